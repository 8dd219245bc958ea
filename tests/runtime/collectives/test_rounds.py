"""Planned trees by point-to-point calls, between threads whose calls are queues."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hocket.api import plan_collective
from hocket.runtime.collectives.group import PlannedRounds


class Boxes:
    """A queue per place; threads that ask for one at the same time get the same."""

    def __init__(self) -> None:
        self.known: dict[Any, queue.Queue[Any]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, place: Any) -> queue.Queue[Any]:
        with self._lock:
            return self.known.setdefault(place, queue.Queue())


class Mail:
    """What a process group does for one rank; ``coalesces``: all calls of a batch at its end."""

    def __init__(self, boxes: Boxes, rank: int, coalesces: bool) -> None:
        self.boxes, self.rank, self.supports_coalescing = boxes, rank, coalesces
        self.calls: list[Mail._Work] = []

    class _Work:
        def __init__(self, wait: Any) -> None:
            self.wait = wait

    def _get_backend(self, device: Any) -> Mail:
        return self

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        # Of NCCL tags say nothing: messages of a pair come in the order of the calls.
        place = (self.rank, peer, 0 if self.supports_coalescing else tag)
        self.boxes[place].put(tensors[0].clone())
        return Mail._Work(lambda: None)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        place = (peer, self.rank, 0 if self.supports_coalescing else tag)
        work = Mail._Work(lambda: tensors[0].copy_(self.boxes[place].get(timeout=60)))
        self.calls.append(work)
        return work

    def _start_coalescing(self, device: Any) -> None:
        self.calls = []

    def _end_coalescing(self, device: Any) -> Any:
        calls = self.calls
        return Mail._Work(lambda: [call.wait() for call in calls])


@pytest.mark.parametrize("coalesces", [False, True])
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather", "reducescatter"])
def test_rounds_end_as_the_collective_should(collective: Any, coalesces: bool) -> None:
    plan = plan_collective("dgx1-v100", collective, gpus="0,1,2,3,4,7", root="7")
    packed, count, shard = plan.offers[0].section, 6, 101
    every = torch.arange(float(count * shard))
    boxes = Boxes()

    def run(rank: int) -> torch.Tensor:
        mine = (every // shard).int() == rank
        data = every + rank
        if collective == "broadcast":
            data = every.clone() if rank == 5 else 0 * every
        if collective == "allgather":
            data = torch.where(mine, every, -1.0)
        # So slow that there are many chunks.
        rounds = PlannedRounds(packed, rank, len(data), 4, 1e4)
        assert rounds.num_chunks > 8
        rounds.carry_out(data, Mail(boxes, rank, coalesces))
        return data[mine] if collective == "reducescatter" else data

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(run, range(count)))
    assert all(box.empty() for box in boxes.known.values())
    wanted = every
    if collective in ("allreduce", "reducescatter"):
        wanted = count * every + sum(range(count))
    if collective == "reducescatter":
        assert torch.equal(torch.cat(found), wanted)
    else:
        assert all(torch.equal(data, wanted) for data in found)
