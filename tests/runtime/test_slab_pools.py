"""Pools of one capture: one is entered at a time, and each lives as long as somebody needs it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hocket.runtime.train.slab_pools import SlabPools

DEVICE = torch.device("cuda", 0)


class Allocator:
    """Counts users of pools as PyTorch's allocator does, and gives out of the one that is begun."""

    def __init__(self) -> None:
        self.users: dict[Any, int] = {}
        self.begun: list[Any] = []
        self.given: list[tuple[Any, int]] = []
        self.num_handles = 0

    def handle(self) -> tuple[int, int]:
        self.num_handles += 1
        return 0, self.num_handles

    def begin(self, device: int, pool: Any) -> None:
        assert pool not in self.begun
        self.users[pool] = self.users.get(pool, 0) + 1
        self.begun.append(pool)

    def end(self, device: int, pool: Any) -> None:
        self.begun.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0

    def storage(self, num_bytes: int, device: torch.device) -> int:
        (pool,) = self.begun
        self.given.append((pool, num_bytes))
        return num_bytes


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.handle)
    monkeypatch.setattr(torch, "UntypedStorage", found.storage)
    for name, function in (
        ("_cuda_beginAllocateToPool", found.begin),
        ("_cuda_endAllocateToPool", found.end),
        ("_cuda_releasePool", found.release),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    return found


def test_pools_take_turns_and_are_given_back(allocator: Allocator) -> None:
    pools = SlabPools(DEVICE, (100, 0, 300))
    allocator.begin(0, pools.ids[0])  # as a capture does
    pools.reserve()
    first, second, third = pools.ids
    assert allocator.given == [(first, 100), (third, 300)]
    for slab in (1, 2, 0, 2, 2, 1, 0):
        pools.enter(slab)
        assert allocator.begun == [pools.ids[slab]]
        pools.leave()
        assert allocator.begun == []
    pools.enter(0)
    allocator.end(0, first)  # as a capture does when it ends
    assert allocator.users == {first: 1, second: 1, third: 1}
    del pools
    gc.collect()
    # The first is the graph's, which may still be replayed.
    assert allocator.users == {first: 1, second: 0, third: 0}
