"""Workers of several ranks in one process: links that fail between and inside of collectives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hocket.api.clusters import cluster_from_text
from hocket.base.errors import RunError
from hocket.runtime.collectives import events, sums
from hocket.runtime.collectives.layout import of_chunks
from hocket.runtime.collectives.worker import CollectiveJob, CollectiveWorker

COUNT = 3


@contextlib.contextmanager
def workers() -> Iterator[list[CollectiveWorker]]:
    store = dist.HashStore()
    cluster = cluster_from_text(f"{COUNT}xv100-16g")
    made = [CollectiveWorker(store, rank, COUNT, lambda: cluster) for rank in range(COUNT)]
    try:
        yield made
    finally:
        for each in [threading.Thread(target=worker.close) for worker in made]:
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


def put(worker: CollectiveWorker, collective: Any, given: np.ndarray) -> Result:
    result = Result()
    worker.put(CollectiveJob(collective, 0, given.copy, result.give, result.fail))
    return result


@pytest.mark.parametrize("collective", ["allreduce", "reducescatter", "broadcast"])
def test_ranks_that_lack_a_collective_when_links_fail_get_it_from_the_others(collective) -> None:
    given = [np.arange(6.0) + 10 * rank for rank in range(COUNT)]
    with workers() as made:
        first = [put(w, collective, g).wait for w, g in zip(made, given, strict=True)]
        wanted = [wait() for wait in first]
        # As if the answer had never reached rank 1: it asks for the same again.
        made[1]._num_done -= 1
        made[1]._store.set("event/0", "mend: a test says so")
        lagging = put(made[1], collective, given[1])
        assert np.array_equal(lagging.wait()[2:4], wanted[1][2:4])
        assert [worker.num_mended for worker in made] == [1] * COUNT
        after = [put(w, "allreduce", np.ones(5)) for w in made]
        assert all(np.array_equal(result.wait(), np.full(5, COUNT)) for result in after)
        assert [worker._num_done for worker in made] == [2] * COUNT


def test_broken_connections_are_mended_inside_of_a_collective() -> None:
    with workers() as made:
        for result in [put(worker, "allreduce", np.ones(10)) for worker in made]:
            result.wait()
        for each in made[0]._sockets:
            if each is not None:
                each.shutdown(2)
        found = [put(worker, "allreduce", np.full(200_000, 1.0)) for worker in made]
        assert all(np.array_equal(result.wait(), np.full(200_000, 3.0)) for result in found)
        assert made[0].num_mended >= 1


def test_ranks_that_call_different_collectives_are_told() -> None:
    with workers() as made:
        results = [
            put(worker, "allreduce", np.ones(10 if rank else 50_000))
            for rank, worker in enumerate(made)
        ]
        for result in results[1:]:
            assert result.done.wait(60)
            assert "rank 0 is in allreduce of less than 524288 bytes" in str(result.error)


def test_a_rank_that_stands_still_under_priorities_is_named(monkeypatch) -> None:
    monkeypatch.setattr(sums, "CALL_S", 0.2)
    monkeypatch.setattr(events, "ANSWER_S", 0.5)
    store, cluster, made = dist.HashStore(), cluster_from_text("2xv100-16g"), {}

    def make(rank: int) -> None:
        made[rank] = sums.SumExchange(store, rank, 2, cluster)

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    section = made[0].plan(400).section
    layout = of_chunks(section, 0, [(0, 0, 400)])
    carry = made[0].begin(layout, np.ones(100, dtype=np.float32))
    carry.ready(0)
    # The thread of rank 1 is never started.
    with pytest.raises(RunError, match="rank 1 does not answer"):
        made[0].wait(carry, 0, 1)
    for each in made.values():
        each.close()
