"""Two lanes captured as one chain of calls: what is asked for is noted, then it is taken apart.

Memory of one stream is never lent to another. So lanes that share memory are captured on one
stream, and one is given what the other has dropped; lanes with memory of their own have a stream
each, and whenever the lane changes its stream waits for the other's, so that it is one chain
nonetheless. The allocator's own record says who was given what: before each call a mark is put into
it, by a byte of another stream. In the graph each lane is a row of its own afterwards, which waits
for the other where it has to (`lane_edges`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.waves.waiting import Edge
from hocket.runtime.lanes import Lane
from hocket.runtime.train.graph_nodes import (
    Nodes,
    arrows_of,
    calls_of,
    change,
    last_nodes,
    new_arrows,
)
from hocket.runtime.train.lane_edges import blocks_of, lane_edges

_MAX_ENTRIES = 2_000_000
"""Of the allocator's record."""


class Notes:
    """What is asked for, call by call, while a stream is captured."""

    def __init__(self, device: torch.device, slabs: Sequence[int]) -> None:
        streams = [torch.cuda.Stream(device) for _ in slabs]  # type: ignore[no-untyped-call]
        self.streams = [streams[lane % len(streams)] for lane in range(NUM_LANES)]
        """Of each lane."""
        self.lane: list[int] = []
        """Of each call."""
        self.told: list[Edge] = []
        self.num_waits = 0
        """Of one lane for the other, in the graph."""
        self._device = device
        self._marks = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slabs = slabs
        self._ends: list[Nodes] = []
        self._is_capturing = False
        self._now = 0
        """The lane whose stream is the current one."""

    def begin_call(self, lane: int) -> None:
        """A call of a lane comes next."""
        if self._is_capturing:
            if self.lane:
                self._ends.append(last_nodes(self.streams[self._now].cuda_stream))
            self.lane.append(lane)
            self._mark()
        self._go_to(lane)

    def wait(self, awaited: int) -> None:
        """The call that is asked for waits for an earlier one."""
        if self._is_capturing:
            self.told.append(Edge(awaited, len(self.lane) - 1))

    @contextmanager
    def call_by_call(self) -> Iterator[None]:
        """On the streams that are captured later, for which libraries make what they need."""
        here = torch.cuda.current_stream(self._device)
        self.streams[0].wait_stream(here)
        with torch.cuda.stream(self.streams[0]), self._all_joined():
            yield
        here.wait_stream(self.streams[0])

    @contextmanager
    def _all_joined(self) -> Iterator[None]:
        """The first lane's stream is the current one before and after."""
        self._now = 0
        try:
            yield
            self._go_to(0)
        finally:
            torch.cuda.set_stream(self.streams[0])

    def _go_to(self, lane: int) -> None:
        """What is asked for next is of this lane and comes after all before."""
        before, after = self.streams[self._now], self.streams[lane]
        self._now = lane
        if before != after:
            after.wait_stream(before)
            torch.cuda.set_stream(after)

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is asked for; the graph has its lanes afterwards and is ready."""
        self.lane, self.told, self._ends = [], [], []
        # As long as one mark is there, others find memory beside it; a capture must not ask for it.
        held = self._mark()
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MAX_ENTRIES
        )
        try:
            # What another thread asks for meanwhile is no concern of this capture.
            with (
                torch.cuda.graph(graph, stream=self.streams[0], capture_error_mode="relaxed"),
                self._all_joined(),
            ):
                for lane, num_bytes in enumerate(self._slabs):
                    # All that calls are given is cut from it.
                    self._go_to(lane)
                    if num_bytes:
                        torch.UntypedStorage(num_bytes, device=self._device)  # type: ignore[no-untyped-call]
                self._is_capturing = True
                try:
                    yield
                finally:
                    self._is_capturing = False
                self._ends.append(last_nodes(self.streams[self._now].cuda_stream))
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
        streams = {stream.cuda_stream for stream in self.streams}
        blocks = blocks_of(trace, streams, self._marks.cuda_stream, len(self.lane))
        pairs: list[tuple[int, int]] = [*lane_edges(self.lane, self.told, blocks, works)]
        self.num_waits = len(pairs)
        for lane in range(NUM_LANES):
            own = [at for at, here in enumerate(self.lane) if here == lane and works[at]]
            pairs += pairwise(own)
        change(raw, calls.between, new_arrows(calls, pairs))
        graph.instantiate()


class NotedLane(Lane):
    """A lane whose calls are noted."""

    def __init__(self, device: torch.device, notes: Notes, which: int) -> None:
        super().__init__(device)
        self._notes, self._which = notes, which

    def make_current(self) -> None:
        """A call of this lane comes next."""
        self._notes.begin_call(self._which)

    def wait(self, event: Any) -> None:
        """The call that comes next waits for another."""
        if event is not None:
            self._notes.wait(event)

    def event(self) -> int:
        """The call that was asked for last."""
        return len(self._notes.lane) - 1
