"""Replay two waves as one CUDA graph whose lanes share memory: one stream, taken apart afterwards.

The calls of both lanes are captured on one stream in the planned order, so that one lane is given
the memory that the other has dropped, and no more is held than planned. In the graph each lane is
then a row of its own, which waits for the other where it has to (`lane_edges`). Libraries keep
scratch memory of their own for each thread, so the calls of the second lane are asked for by a
second thread. The first steps run op by op in the same order, so that libraries choose kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from hocket.plan.sections.lanes import NUM_LANES
from hocket.runtime.lanes import Lane
from hocket.runtime.train.carrier import Carried
from hocket.runtime.train.graph_nodes import (
    Nodes,
    arrows_of,
    calls_of,
    change,
    last_nodes,
    new_arrows,
)
from hocket.runtime.train.lane_edges import Edge, blocks_of, lane_edges
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.replayed_waves import ReplayedWaves
from hocket.runtime.train.waves import Wave, WaveOrder, Waves, WaveStep

_MAX_ENTRIES = 2_000_000
"""Of the allocator's record."""


class Notes:
    """What is asked for, call by call, while a stream is captured."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.lane: list[int] = []
        """Of each call."""
        self.told: list[Edge] = []
        self._device = device
        self._marks = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ends: list[Nodes] = []
        self._is_capturing = False

    def begin_call(self, lane: int) -> None:
        """A call of a lane comes next."""
        if self._is_capturing:
            if self.lane:
                self._ends.append(last_nodes(self.stream.cuda_stream))
            self.lane.append(lane)
            self._mark()

    def wait(self, awaited: int) -> None:
        """The call that is asked for waits for an earlier one."""
        if self._is_capturing:
            self.told.append(Edge(awaited, len(self.lane) - 1))

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, slab_bytes: int) -> Iterator[None]:
        """Capture what is asked for; the graph has its lanes afterwards and is ready."""
        self.lane, self.told, self._ends = [], [], []
        self._mark()
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_MAX_ENTRIES
        )
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                if slab_bytes:
                    # All that calls are given is cut from it.
                    torch.UntypedStorage(slab_bytes, device=self._device)  # type: ignore[no-untyped-call]
                self._is_capturing = True
                try:
                    yield
                finally:
                    self._is_capturing = False
                self._ends.append(last_nodes(self.stream.cuda_stream))
            trace = torch.cuda.memory._snapshot(self._device)["device_traces"]
        finally:
            torch.cuda.memory._record_memory_history(None)
        self._take_apart(graph, trace[self._device.index or 0])

    def _mark(self) -> None:
        with torch.cuda.stream(self._marks):
            torch.UntypedStorage(1, device=self._device)  # type: ignore[no-untyped-call]

    def _take_apart(self, graph: torch.cuda.CUDAGraph, trace: list[Any]) -> None:
        raw = graph.raw_cuda_graph()
        calls = calls_of(arrows_of(raw), self._ends)
        works = [bool(last) for last in calls.last]
        streams = self.stream.cuda_stream, self._marks.cuda_stream
        blocks = blocks_of(trace, *streams, len(self.lane))
        self.edges = lane_edges(self.lane, self.told, blocks, works)
        pairs: list[tuple[int, int]] = [*self.edges]
        for lane in range(NUM_LANES):
            own = [at for at, here in enumerate(self.lane) if here == lane and works[at]]
            pairs += pairwise(own)
        change(raw, calls.between, new_arrows(calls, pairs))
        graph.instantiate()


class NotedLane(Lane):
    """A lane whose calls are noted; all lanes have one stream."""

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


class LaneGraph(ReplayedWaves):
    """Waves on one CUDA device, in one graph and one memory."""

    keeps = True

    def __init__(
        self, programs: Programs, order: WaveOrder, device: torch.device, slab_bytes: int = 0
    ) -> None:
        super().__init__(programs, order, device)
        self.notes, self._slab_bytes = Notes(device), slab_bytes
        self._lanes = [NotedLane(device, self.notes, which) for which in range(NUM_LANES)]
        self._beside = ThreadPoolExecutor(1, initializer=self._enter_thread)

    def _enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self.notes.stream)

    def _run(self, own: WaveStep, op: int, lane: int) -> None:
        if lane:
            self._beside.submit(_recorded, own, op).result()
        else:
            own.run(op)

    @contextmanager
    def _on_lanes(self) -> Iterator[None]:
        here = torch.cuda.current_stream(self._device)
        if here == self.notes.stream:
            yield
            return
        self.notes.stream.wait_stream(here)
        with torch.cuda.stream(self.notes.stream):
            yield
        here.wait_stream(self.notes.stream)

    def _captured(
        self, graph: torch.cuda.CUDAGraph, waves: Sequence[Wave], step: int
    ) -> list[Carried]:
        with self.notes.capture(graph, self._slab_bytes):
            return Waves.carry(self, waves, step)


def _recorded(own: WaveStep, op: int) -> None:
    with own.as_recorded():
        own.run(op)
