"""Two lanes captured as one chain of calls: what is asked for is noted, then it is taken apart.

Memory of one stream is never lent to another. So both lanes are captured on one stream: in one
memory, where one is given what the other has dropped, or in several (`slab_pools`), of each lane's
own and parts that they hand over, where a call is given what its plan says. The allocator's own
record says who was given what: before each call a mark is put into it, by a byte of another stream.
In the graph each lane is a row of its own afterwards, which waits for the other where it has to
(`lane_edges`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch

from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.waves.waiting import Edge
from hocket.runtime.streams import DeviceStream
from hocket.runtime.train.captured import on_stream
from hocket.runtime.train.graph_nodes import (
    Nodes,
    arrows_of,
    calls_of,
    change,
    last_nodes,
    new_arrows,
)
from hocket.runtime.train.lane_edges import allocations_of, lane_edges
from hocket.runtime.train.slab_pools import SlabPools

_MAX_ENTRIES = 2_000_000
"""Of the allocator's record."""


class Notes:
    """What is asked for, call by call, while a stream is captured."""

    def __init__(self, device: torch.device, slabs: Sequence[int]) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.lane: list[int] = []
        """Of each call."""
        self.told: list[Edge] = []
        self.num_waits = 0
        """Of one lane for the other, in the graph."""
        self._device = device
        self._marks = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slabs = slabs
        self._pools: SlabPools | None = None
        self._ends: list[Nodes] = []
        self._is_capturing = False

    def begin_call(self, lane: int, slab: int) -> None:
        """A call of a lane comes next, and what it makes lies in a slab."""
        if not self._is_capturing:
            return
        assert self._pools is not None
        if self.lane:
            self._end_call()
        self.lane.append(lane)
        self._pools.leave()
        self._mark()
        self._pools.enter(slab)

    def _end_call(self) -> None:
        self._ends.append(last_nodes(self.stream.cuda_stream))

    def wait(self, awaited: int) -> None:
        """The call that is asked for waits for an earlier one."""
        if self._is_capturing:
            self.told.append(Edge(awaited, len(self.lane) - 1))

    def call_by_call(self) -> AbstractContextManager[None]:
        """On the stream that is captured later, for which libraries make what they need."""
        return on_stream(self.stream, self._device)

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is asked for; the graph has its lanes afterwards and is ready."""
        self.lane, self.told, self._ends = [], [], []
        # As long as one mark is there, others find memory beside it; a capture must not ask for it.
        held = self._mark()
        pools = self._pools = SlabPools(self._device, self._slabs)
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MAX_ENTRIES
        )
        try:
            # What another thread asks for meanwhile is no concern of this capture.
            with torch.cuda.graph(
                graph, pool=pools.ids[0], stream=self.stream, capture_error_mode="relaxed"
            ):
                try:
                    pools.reserve()
                    self._is_capturing = True
                    yield
                finally:
                    self._is_capturing = False
                    pools.enter(0)
                self._end_call()
            trace = torch.cuda.memory._snapshot(self._device)["device_traces"]
        finally:
            torch.cuda.memory._record_memory_history(None)
            del held
        self._take_apart(graph, trace[self._device.index or 0])

    def _mark(self) -> torch.UntypedStorage:
        with torch.cuda.stream(self._marks):
            return torch.UntypedStorage(1, device=self._device)  # type: ignore[no-untyped-call]

    def _take_apart(self, graph: torch.cuda.CUDAGraph, trace: list[Any]) -> None:
        raw = graph.raw_cuda_graph()
        calls = calls_of(arrows_of(raw), self._ends)
        works = [bool(last) for last in calls.last]
        streams = {self.stream.cuda_stream}
        allocations = allocations_of(trace, streams, self._marks.cuda_stream, len(self.lane))
        pairs: list[tuple[int, int]] = [*lane_edges(self.lane, self.told, allocations, works)]
        self.num_waits = len(pairs)
        for lane in range(NUM_LANES):
            own = [at for at, here in enumerate(self.lane) if here == lane and works[at]]
            pairs += pairwise(own)
        change(raw, calls.between, new_arrows(calls, pairs))
        graph.instantiate()


class NotedLane(DeviceStream):
    """A lane whose calls are noted."""

    def __init__(self, device: torch.device, notes: Notes) -> None:
        super().__init__(device)
        self._notes = notes

    def wait(self, event: Any) -> None:
        """The call that comes next waits for another."""
        if event is not None:
            self._notes.wait(event)

    def event(self) -> int:
        """The call that was asked for last."""
        return len(self._notes.lane) - 1
