"""Replay a recorded step as one CUDA graph: the host asks once instead of once per op.

The first steps run op by op, so that libraries choose their kernels. Then the same calls are made
once more while CUDA only notes them, into memory of the graph's own; from then on a step copies its
batch into place and launches the whole (`repeats`). Random draws go on as before: the graph takes
its offset from PyTorch's generator at each launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hocket.capture.program import Program
from hocket.graph.graph import Role
from hocket.runtime.placed_program import Setup
from hocket.runtime.train.captured import StaticBatch
from hocket.runtime.train.cuda_graphs import GraphReplay, Same
from hocket.runtime.train.eager_step import EagerStep, Given
from hocket.runtime.train.loss_weight import Weight


class _CapturedStep(NamedTuple):
    """A graph of a step, with what it reads and makes."""

    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    results: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]


class StaticInputs:
    """The batch of a recorded step in memory that a graph reads."""

    def __init__(self, program: Program, given: Given) -> None:
        self._inputs = [
            [number for number in here if program.tensors[number].role == Role.INPUT]
            for here in given
        ]
        self._static = StaticBatch(self._batch_of(given))

    def _batch_of(self, given: Given) -> list[dict[int, torch.Tensor]]:
        return [
            {number: here[number] for number in numbers}
            for numbers, here in zip(self._inputs, given, strict=True)
        ]

    def within(self, given: Given) -> list[dict[int, torch.Tensor]]:
        """Tensors that exist before a step, with this memory in place of the batch."""
        return [{**here, **static} for here, static in zip(given, self._static.batch, strict=True)]

    def refill(self, given: Given) -> None:
        """Copy the batch of a step."""
        self._static.refill(self._batch_of(given))


class ReplayedStep(EagerStep):
    """A step on one CUDA device, replayed where forward and backward run in one call."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(setup, device, seed=seed, keep=keep)
        draws = seed is not None and bool(setup.program.draws)
        self.replay: GraphReplay[_CapturedStep] = GraphReplay(
            "its draws have seeds of their own" if draws else ""
        )
        self._replayed: _CapturedStep | None = None
        """The capture that the last step was replayed from."""
        self._scale = torch.ones((), device=device)

    @property
    def lends(self) -> bool:
        """True if gradients are the graph's own memory, which the next replay overwrites."""
        return self.replay.captured is not None

    def forward(self, given: Given, step: int) -> None:
        """Call by call, also where whole steps are replayed."""
        self._replayed = None
        super().forward(given, step)

    def run(self, given: Given, step: int, weight: Weight = 1.0) -> None:
        """The whole step at once, unless gradients are taken one by one while it runs."""
        if self.on_gradient is not None:
            self._replayed = None
            super().run(given, step, weight)
            return
        self._replayed = found = self.replay.find(Same(given), lambda: self._capture(given, step))
        if found is None:
            super().run(given, step, weight)
            return
        found.inputs.refill(given)
        self._scale.fill_(weight)
        found.graph.replay()
        self.gradients = dict(found.gradients)

    def value(self, tensor: int) -> torch.Tensor:
        """A tensor that was kept; a copy, where the next replay overwrites it."""
        if self._replayed is None:
            return super().value(tensor)
        return self._replayed.results[tensor].clone()

    def _capture(self, given: Given, step: int) -> _CapturedStep:
        inputs = StaticInputs(self.setup.program, given)
        static = inputs.within(given)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                super().run(static, step, self._scale)
            results = {t: super(ReplayedStep, self).value(t) for t in self._keep}
            return _CapturedStep(graph, inputs, results, self.gradients)
        finally:
            super().forget()
