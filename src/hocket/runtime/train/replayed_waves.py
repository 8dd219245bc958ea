"""Replay two waves as one CUDA graph: lanes fork and join inside it, the host asks once.

Two rows of small kernels leave a device idle while the host asks for them one by one, so that two
streams gain little; a graph has both rows before it starts. The first steps run op by op, so that
libraries choose their kernels. Then the same calls are made once more while CUDA only notes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hocket.base.errors import one_line
from hocket.runtime.train.between_waves import BetweenWaves
from hocket.runtime.train.carrier import Carried
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.replay import NUM_WARM, StaticInputs
from hocket.runtime.train.waves import Wave, WaveOrder, Waves


class ReplayedWaves(Waves):
    """Waves on one CUDA device, launched as a whole."""

    keeps = False
    """Whether the captured graph is changed before it is made ready."""

    def __init__(self, programs: Programs, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
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
            return super().carry(waves, step)
        origin = (*(w.recorded for w in waves), *(tensor.data_ptr() for tensor in tensors))
        if self._graph is None or origin != self._captured_from:
            self._capture(waves, step)
            self._captured_from = origin
        if self._graph is None:
            return super().carry(waves, step)
        for inputs, scale, wave in zip(self._inputs, self._scales, waves, strict=True):
            inputs.refill(wave.given)
            scale.fill_(wave.weight)
        self._graph.replay()
        for name, gradient in self._lent.items():
            self._programs.tensors[name].grad = gradient
        return [Carried(each.loss.clone(), tree_map(_own, each.outputs)) for each in self._outcomes]

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
        graph = torch.cuda.CUDAGraph(keep_graph=self.keeps)
        tensors = self._programs.tensors
        try:
            self._outcomes = self._captured(graph, static, step)
        # A kernel that cannot be captured is no failure: waves go on op by op.
        except Exception as error:
            self.refusal = one_line(error)
            torch.cuda.synchronize(self._device)
        else:
            self._graph = graph
            self._lent = {name: t.grad for name, t in tensors.items() if t.grad is not None}
        for tensor in tensors.values():
            tensor.grad = None

    def _captured(
        self, graph: torch.cuda.CUDAGraph, waves: Sequence[Wave], step: int
    ) -> list[Carried]:
        with torch.cuda.graph(graph):
            return Waves.carry(self, waves, step)


def make_waves(programs: Programs, order: WaveOrder, device: torch.device) -> Waves:
    """Waves on a device, replayed where it is a CUDA device and its programs are."""
    if order.changes == "wave":
        return BetweenWaves(programs, order, device)
    replayed = programs.replay and device.type == "cuda"
    return (ReplayedWaves if replayed else Waves)(programs, order, device)


def _own(value: Any) -> Any:
    """A copy of a tensor that the next replay overwrites."""
    return value.clone() if isinstance(value, torch.Tensor) else value
