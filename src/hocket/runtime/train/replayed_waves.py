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

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from hocket.plan.sections.lanes import NUM_LANES
from hocket.runtime.train.between_waves import BetweenWaves
from hocket.runtime.train.captured import cloned
from hocket.runtime.train.carrier import Carried
from hocket.runtime.train.lane_notes import NotedLane, Notes
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.repeats import Repeats
from hocket.runtime.train.replay import StaticInputs
from hocket.runtime.train.waves import Wave, WaveOrder, Waves, WaveStep


class _CapturedWaves(NamedTuple):
    """A graph of all waves, with what it reads and makes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[StaticInputs]
    scales: list[torch.Tensor]
    outcomes: list[Carried]
    gradients: dict[str, torch.Tensor]


class ReplayedWaves(Waves):
    """Waves on one CUDA device, launched as a whole."""

    def __init__(self, programs: Programs, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self.notes = Notes(device, order.slabs)
        self._lanes = [NotedLane(device, self.notes) for _ in range(NUM_LANES)]
        self._beside = ThreadPoolExecutor(1, initializer=_enter, initargs=(self.notes.stream,))
        self.repeats: Repeats[_CapturedWaves] = Repeats()

    def carry(self, waves: Sequence[Wave], step: int) -> list[Carried]:
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
        return [Carried(each.loss.clone(), cloned(each.outputs)) for each in found.outcomes]

    def _call_by_call(self, waves: Sequence[Wave], step: int) -> list[Carried]:
        with self.notes.call_by_call():
            return super().carry(waves, step)

    def _begin(self, lane: int, op: int) -> None:
        self.notes.begin_call(lane, self._order.slab_of(lane, op))

    def _run(self, own: WaveStep, op: int, lane: int) -> None:
        if lane:
            self._beside.submit(_recorded, own, op).result()
        else:
            own.run(op)

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
        own.run(op)
