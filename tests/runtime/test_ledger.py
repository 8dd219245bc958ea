"""The byte-counting allocator: what is let go while it counts."""

import threading

import torch

from hocket.runtime.memory.ledger import Ledger


def test_what_other_threads_let_go_is_counted_once():
    ledger = Ledger()
    with ledger:
        kept = [torch.ones(1) for _ in range(20_000)]

        def let_go():
            while kept:
                kept.pop()

        thread = threading.Thread(target=let_go)
        thread.start()
        for _ in range(20_000):
            torch.ones(1)
        thread.join()
    assert ledger.held_bytes == 0
