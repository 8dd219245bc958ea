"""Replay two waves as one CUDA graph in which lanes run side by side in one memory.

Two rows of small kernels leave a device idle while the host asks for them one by one, so that two
streams gain little; a graph has both rows before it starts. The calls of both lanes are captured on
one stream in the planned order and made two rows of the graph afterwards (`lane_notes`), so no more
is held than planned. Libraries keep scratch memory of their own for each thread, so the second
lane's calls are asked for by a second thread. The first steps run call by call in the same order,
so that libraries choose their kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hocket.base.errors import one_line
from hocket.plan.sections.lanes import NUM_LANES
from hocket.runtime.train.between_waves import BetweenWaves
from hocket.runtime.train.called import cloned
from hocket.runtime.train.carrier import Carried
from hocket.runtime.train.lane_notes import NotedLane, Notes
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.replay import NUM_WARM, StaticInputs
from hocket.runtime.train.waves import Wave, WaveOrder, Waves, WaveStep


class ReplayedWaves(Waves):
    """Waves on one CUDA device, launched as a whole."""

    def __init__(self, programs: Programs, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self.notes = Notes(device)
        self._lanes = [NotedLane(device, self.notes, which) for which in range(NUM_LANES)]
        self._beside = ThreadPoolExecutor(1, initializer=_enter, initargs=(self.notes.stream,))
        self.refusal = ""
        """Why waves are not replayed; empty where they are or will be."""
        self._num_eager = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_from: tuple[Any, ...] = ()
        self._inputs: list[StaticInputs] = []
        self._scales: list[torch.Tensor] = []
        self._outcomes: list[Carried] = []
        self._lent: dict[str, torch.Tensor] = {}

    def carry(self, waves: Sequence[Wave], step: int) -> list[Carried]:
        """Forward and backward of all waves; gradients that wait for more are added op by op."""
        tensors = self._programs.tensors.values()
        is_pending = any(tensor.grad is not None for tensor in tensors)
        if self.refusal or is_pending or self._num_eager < NUM_WARM:
            self._num_eager += 1
            return self._call_by_call(waves, step)
        origin = (*(w.recorded for w in waves), *(tensor.data_ptr() for tensor in tensors))
        if self._graph is None or origin != self._captured_from:
            self._capture(waves, step)
            self._captured_from = origin
        if self._graph is None:
            return self._call_by_call(waves, step)
        for inputs, scale, wave in zip(self._inputs, self._scales, waves, strict=True):
            inputs.refill(wave.given)
            scale.fill_(wave.weight)
        self._graph.replay()
        for name, gradient in self._lent.items():
            self._programs.tensors[name].grad = gradient
        return [Carried(each.loss.clone(), cloned(each.outputs)) for each in self._outcomes]

    def _call_by_call(self, waves: Sequence[Wave], step: int) -> list[Carried]:
        """On the stream that is captured later, for which libraries make what they need."""
        here = torch.cuda.current_stream(self._device)
        self.notes.stream.wait_stream(here)
        with torch.cuda.stream(self.notes.stream):
            found = super().carry(waves, step)
        here.wait_stream(self.notes.stream)
        return found

    def _run(self, own: WaveStep, op: int, lane: int) -> None:
        if lane:
            self._beside.submit(_recorded, own, op).result()
        else:
            own.run(op)

    def _capture(self, waves: Sequence[Wave], step: int) -> None:
        self._graph, self._outcomes, self._lent = None, [], {}
        self._inputs = [StaticInputs(wave.recorded.program, wave.given) for wave in waves]
        self._scales = [torch.ones((), device=self._device) for _ in waves]
        static = [
            Wave(wave.recorded, inputs.within(wave.given), scale)
            for wave, inputs, scale in zip(waves, self._inputs, self._scales, strict=True)
        ]
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        tensors = self._programs.tensors
        try:
            with self.notes.capture(graph, self._order.slab_bytes):
                self._outcomes = super().carry(static, step)
        # A kernel that cannot be captured is no failure: waves go on op by op.
        except Exception as error:
            self.refusal = one_line(error)
            torch.cuda.synchronize(self._device)
        else:
            self._graph = graph
            self._lent = {name: t.grad for name, t in tensors.items() if t.grad is not None}
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
