"""Replay of a traced step as one CUDA graph: one launch by the host instead of one per op.

The first steps run op by op, so that libraries choose their kernels. The next one is captured, in
the graph's own memory; later steps copy their batch into the static inputs and launch the graph.
Random draws continue as in eager steps: the graph reads its offset from PyTorch's generator at each
launch.
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
    """A CUDA graph of a step, with its inputs and results."""

    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    results: dict[int, torch.Tensor]
    gradients: dict[int, torch.Tensor]


class StaticInputs:
    """The batch of a traced step, in the memory that a CUDA graph reads."""

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
        """Return the tensors of ``given`` with the static batch in place of its batch."""
        return [{**here, **static} for here, static in zip(given, self._static.batch, strict=True)]

    def refill(self, given: Given) -> None:
        """Copy the batch of a step into the static batch."""
        self._static.refill(self._batch_of(given))


class ReplayedStep(EagerStep):
    """A step on one CUDA device, replayed if forward and backward run in one call."""

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
        """Captured step that the last step replayed, or None."""
        self._scale = torch.ones((), device=device)

    @property
    def lends(self) -> bool:
        """True if gradients are memory of the graph, which the next replay overwrites."""
        return self.replay.captured is not None

    def forward(self, given: Given, step: int) -> None:
        """Run the forward pass op by op, even if entire steps are replayed."""
        self._replayed = None
        super().forward(given, step)

    def run(self, given: Given, step: int, weight: Weight = 1.0) -> None:
        """Run forward and backward, by replay unless `on_gradient` receives gradients one by
        one."""
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
        """Return a tensor that was kept; after a replay, a copy that the next replay does not
        overwrite."""
        if self._replayed is None:
            return super().value(tensor)
        return self._replayed.results[tensor].clone()

    def _capture(self, given: Given, step: int) -> _CapturedStep:
        inputs = StaticInputs(self.program, given)
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
