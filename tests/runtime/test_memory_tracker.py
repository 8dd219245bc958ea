"""The memory tracker: tensors that are freed while it counts."""

import threading

import torch

from hocket.runtime.offload.memory_tracker import MemoryTracker, is_product


def test_what_other_threads_let_go_is_counted_once():
    tracker = MemoryTracker()
    with tracker:
        kept = [torch.ones(1) for _ in range(20_000)]

        def let_go():
            while kept:
                kept.pop()

        thread = threading.Thread(target=let_go)
        thread.start()
        for _ in range(20_000):
            torch.ones(1)
        thread.join()
    assert tracker.held_bytes == 0


def test_products_of_matrices_are_noted_and_convolutions_are_none():
    tracker = MemoryTracker()
    rows = torch.ones(2, 3, 4)
    with tracker:
        torch.conv1d(rows, torch.ones(5, 3, 3)).relu().sum()
    assert not tracker.has_products
    with tracker:
        torch.nn.functional.linear(rows, torch.ones(6, 4))
    assert tracker.has_products
    assert is_product("aten.addmm_.default")
    assert not is_product("aten.add.Tensor")
