"""Replay a recorded step as one CUDA graph: the host asks once instead of once per op.

The first steps run op by op, so that libraries choose their kernels. Then the same calls are made
once more while CUDA only notes them, into memory of the graph's own; from then on a step copies its
batch into place and launches the whole. Random draws go on as before: the graph takes its offset
from PyTorch's generator at each launch. What cannot be captured goes on op by op, and says why.
"""

from __future__ import annotations

import torch

from hocket.base.errors import one_line
from hocket.capture.program import Program
from hocket.graph.graph import Role
from hocket.runtime.setup import Setup
from hocket.runtime.train.carry import CarriedStep, Given
from hocket.runtime.train.weight import Weight

NUM_WARM = 2
"""Steps op by op before the capture."""


class StaticInputs:
    """The batch in memory that a graph reads: later batches are copied into it."""

    def __init__(self, program: Program, given: Given) -> None:
        self._tensors = {
            number: tensor.clone()
            for here in given
            for number, tensor in here.items()
            if program.tensors[number].role == Role.INPUT
        }

    def within(self, given: Given) -> list[dict[int, torch.Tensor]]:
        """What is there before a step, with this memory in place of the batch."""
        return [{n: self._tensors.get(n, tensor) for n, tensor in here.items()} for here in given]

    def refill(self, given: Given) -> None:
        """Copy the batch of a step."""
        for here in given:
            for number, static in self._tensors.items():
                if number in here:
                    static.copy_(here[number], non_blocking=True)


class ReplayedStep(CarriedStep):
    """A step on one CUDA device, replayed when it is carried out as a whole."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(setup, device, seed=seed, keep=keep)
        self.refusal = ""
        """Why the step is not replayed; empty where it is or will be."""
        if seed is not None and setup.program.draws:
            self.refusal = "its draws have seeds of their own"
        self._num_eager = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_from: Given | None = None
        self._inputs: StaticInputs | None = None
        self._results: dict[int, torch.Tensor] = {}
        self._lent: dict[int, torch.Tensor] = {}
        self._scale = torch.ones((), device=device)
        self._is_replayed = False

    @property
    def lends(self) -> bool:
        """Whether gradients are the graph's own memory, which the next replay overwrites."""
        return self._graph is not None

    def carry_out(self, given: Given, step: int, weight: Weight = 1.0) -> None:
        """The whole step at once."""
        self._is_replayed = False
        if self.refusal or self._num_eager < NUM_WARM:
            self._num_eager += 1
            super().carry_out(given, step, weight)
            return
        if self._graph is None or given is not self._captured_from:
            self._capture(given, step)
        if self._graph is None:
            super().carry_out(given, step, weight)
            return
        assert self._inputs is not None
        self._inputs.refill(given)
        self._scale.fill_(weight)
        self._graph.replay()
        self._is_replayed = True
        self.gradients = dict(self._lent)

    def value(self, tensor: int) -> torch.Tensor:
        """A tensor that was kept; a copy, where the next replay overwrites it."""
        return self._results[tensor].clone() if self._is_replayed else super().value(tensor)

    def _capture(self, given: Given, step: int) -> None:
        self._graph, self._results, self._lent = None, {}, {}
        self._inputs = StaticInputs(self.setup.program, given)
        static = self._inputs.within(given)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                super().carry_out(static, step, self._scale)
        # A kernel that cannot be captured is no failure: the step goes on op by op.
        except Exception as error:
            self.refusal = one_line(error)
            super().forget()
            torch.cuda.synchronize(self.device)
            return
        self._results = {t: super(ReplayedStep, self).value(t) for t in self._keep}
        self._lent = self.gradients
        self._graph, self._captured_from = graph, given
        super().forget()
