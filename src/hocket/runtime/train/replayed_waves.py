"""Replay two waves as one CUDA graph in which lanes run side by side.

Two rows of small kernels leave a device idle while the host asks for them one by one, so that two
streams gain little; a graph has both rows before it starts. The calls of both lanes are captured
one after the other in the planned order and made two rows of the graph afterwards (`lane_notes`),
so no more is held than planned, in one memory, in one of each lane's own, or in parts that lanes
hand over. Libraries keep scratch memory of their own for each thread, so the second lane's calls
are asked for by a second thread.
The first steps run call by call in the same order (`repeats`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.waves.waiting import Edge
from hocket.runtime.strategy import StepOutput
from hocket.runtime.streams import DeviceStream
from hocket.runtime.train.between_waves import BetweenWaves
from hocket.runtime.train.captured import cloned, on_stream
from hocket.runtime.train.cuda_graphs import Repeats
from hocket.runtime.train.graph_nodes import (
    Nodes,
    arrows_of,
    calls_of,
    change,
    last_nodes,
    new_arrows,
)
from hocket.runtime.train.lane_edges import allocations_of, lane_edges
from hocket.runtime.train.replay import StaticInputs
from hocket.runtime.train.slab_pools import SlabPools
from hocket.runtime.train.traced_model import Programs
from hocket.runtime.train.waves import Wave, WaveOrder, Waves, WaveStep

# Two lanes captured as one chain of calls: what is asked for is noted, then it is taken apart.
#
# Memory of one stream is never lent to another. So both lanes are captured on one stream: in one
# memory, where one is given what the other has dropped, or in several (`slab_pools`), of each
# lane's own and parts that they hand over, where a call is given what its plan says. The
# allocator's own record says who was given what: before each call a mark is put into it, by a byte
# of another stream. In the graph each lane is a row of its own afterwards, which waits for the
# other where it has to (`lane_edges`).

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


class _CapturedWaves(NamedTuple):
    """A graph of all waves, with what it reads and makes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[StaticInputs]
    scales: list[torch.Tensor]
    outcomes: list[StepOutput]
    gradients: dict[str, torch.Tensor]


class ReplayedWaves(Waves):
    """Waves on one CUDA device, launched as a whole."""

    def __init__(self, programs: Programs, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self.notes = Notes(device, order.slabs)
        self._lanes = [NotedLane(device, self.notes) for _ in range(NUM_LANES)]
        self._beside = ThreadPoolExecutor(1, initializer=_enter, initargs=(self.notes.stream,))
        self.repeats: Repeats[_CapturedWaves] = Repeats()

    def carry(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """Forward and backward of all waves; gradients that wait for more are added op by op."""
        tensors = self._programs.tensors.values()
        if any(tensor.grad is not None for tensor in tensors):
            return self._call_by_call(waves, step)
        origin = (*(w.recorded for w in waves), *(tensor.data_ptr() for tensor in tensors))
        found = self.repeats.find(origin, lambda: self._capture(waves, step))
        if found is None:
            return self._call_by_call(waves, step)
        for inputs, scale, wave in zip(found.inputs, found.scales, waves, strict=True):
            inputs.refill(wave.given)
            scale.fill_(wave.weight)
        found.graph.replay()
        for name, gradient in found.gradients.items():
            self._programs.tensors[name].grad = gradient
        return [StepOutput(each.loss.clone(), cloned(each.outputs)) for each in found.outcomes]

    def _call_by_call(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        with self.notes.call_by_call():
            return super().carry(waves, step)

    def _begin(self, lane: int, op: int) -> None:
        self.notes.begin_call(lane, self._order.slab_of(lane, op))

    def _run(self, own: WaveStep, op: int, lane: int) -> None:
        if lane:
            self._beside.submit(_recorded, own, op).result()
        else:
            own.run_op(op)

    @property
    def replays(self) -> str:
        """How waves are launched; see `TellsReplay`."""
        return self.repeats.told

    def _capture(self, waves: Sequence[Wave], step: int) -> _CapturedWaves:
        read = [StaticInputs(wave.recorded.program, wave.given) for wave in waves]
        scales = [torch.ones((), device=self._device) for _ in waves]
        static = [
            Wave(wave.recorded, inputs.within(wave.given), scale)
            for wave, inputs, scale in zip(waves, read, scales, strict=True)
        ]
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        tensors = self._programs.tensors
        try:
            with self.notes.capture(graph):
                outcomes = super().carry(static, step)
            gradients = {name: t.grad for name, t in tensors.items() if t.grad is not None}
            return _CapturedWaves(graph, read, scales, outcomes, gradients)
        finally:
            for tensor in tensors.values():
                tensor.grad = None


def make_waves(programs: Programs, order: WaveOrder, device: torch.device) -> Waves:
    """Waves on a device, replayed where it is a CUDA device and its programs are."""
    if order.changes == "wave":
        return BetweenWaves(programs, order, device)
    replayed = programs.replay and device.type == "cuda"
    return (ReplayedWaves if replayed else Waves)(programs, order, device)


def _enter(stream: torch.cuda.Stream) -> None:
    """A thread that asks for calls of a stream."""
    torch.cuda.set_device(stream.device)
    torch.cuda.set_stream(stream)


def _recorded(own: WaveStep, op: int) -> None:
    with own.as_recorded():
        own.run_op(op)
