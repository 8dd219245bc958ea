"""Threads of several ranks in one process: what each says when a rank or a link fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hocket.base.errors import RunError
from hocket.hardware.shorthand import cluster_from_text
from hocket.runtime.collectives import rank_events
from hocket.runtime.collectives.rank_tables import tables_of_chunks
from hocket.runtime.collectives.tree_thread import CollectiveJob, TreeThread

COUNT = 3


@contextlib.contextmanager
def threads() -> Iterator[list[TreeThread]]:
    store = dist.HashStore()
    cluster = cluster_from_text(f"{COUNT}xv100-16g")
    made = [TreeThread(store, rank, COUNT, lambda: cluster) for rank in range(COUNT)]
    try:
        yield made
    finally:
        for each in [threading.Thread(target=each_thread.close) for each_thread in made]:
            each.start()


class Result:
    """What a job gave or failed with."""

    def __init__(self) -> None:
        self.done, self.value, self.error = threading.Event(), None, None

    def give(self, data: Any) -> None:
        self.value = data.copy()
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()

    def wait(self) -> Any:
        assert self.done.wait(60)
        assert self.error is None, self.error
        return self.value


def put(each_thread: TreeThread, collective: Any, given: np.ndarray) -> Result:
    result = Result()
    each_thread.put(CollectiveJob(collective, 0, given.copy, result.give, result.fail))
    return result


def test_a_link_that_breaks_is_named_by_every_rank() -> None:
    with threads() as made:
        for result in [put(each, "allreduce", np.ones(10)) for each in made]:
            result.wait()
        for each in made[0]._sockets:
            if each is not None:
                each.shutdown(2)
        results = [put(each, "allreduce", np.full(200_000, 1.0)) for each in made]
        for result in results:
            assert result.done.wait(60)
            assert "broke its connection" in str(result.error)


def test_ranks_that_call_different_collectives_are_told() -> None:
    with threads() as made:
        results = [
            put(each_thread, "allreduce", np.ones(10 if rank else 50_000))
            for rank, each_thread in enumerate(made)
        ]
        for result in results[1:]:
            assert result.done.wait(60)
            assert "rank 0 called allreduce of less than 524288 bytes" in str(result.error)


def test_a_rank_that_stands_still_under_priorities_is_named(monkeypatch) -> None:
    monkeypatch.setattr(rank_events, "CALL_S", 0.2)
    monkeypatch.setattr(rank_events, "ANSWER_S", 0.5)
    store, cluster, made = dist.HashStore(), cluster_from_text("2xv100-16g"), {}

    def make(rank: int) -> None:
        made[rank] = TreeThread(store, rank, 2, lambda: cluster)
        made[rank].open()

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    section = made[0].plan(400).section
    tables = tables_of_chunks(section, 0, [(0, 0, 400)])
    run = made[0].begin(tables, np.ones(100, dtype=np.float32))
    run.ready(0)
    # The thread of rank 1 is never started.
    with pytest.raises(RunError, match="rank 1 does not answer"):
        made[0].wait(run, 0, 1)
    for each in made.values():
        each.close()
