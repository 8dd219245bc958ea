"""Carry out a recorded step on several real devices of this process, or with every op timed.

What `CarriedStep` is for one device, with the streams, events and marks of `SingleProcess`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hocket.capture.program import Call
from hocket.graph.graph import Phase
from hocket.runtime.held import Held
from hocket.runtime.record import StepRecord
from hocket.runtime.setup import Setup
from hocket.runtime.single import SingleProcess
from hocket.runtime.split import Do, Instruction
from hocket.runtime.train.repeated import Redraws
from hocket.runtime.train.weight import Weight, starts_backward
from hocket.runtime.worker import DeviceWorker


class StreamedStep(SingleProcess):
    """The forward and backward of a step, as `SingleProcess` runs it, on a person's own tensors."""

    def __init__(
        self,
        setup: Setup,
        devices: Sequence[torch.device],
        *,
        seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """``keep`` are tensors to hold beside loss and gradients."""
        super().__init__(setup, None, devices, seed=seed)
        self._keep = keep | {*setup.program.outputs}
        self._weight: Weight = 1.0
        self.gradients: dict[int, torch.Tensor] = {}
        """By parameter."""
        self._redraws = {worker: Redraws(setup.program, worker.device) for worker in self.workers}

    def carry_out(
        self, given: Sequence[Mapping[int, torch.Tensor]], step: int, weight: Weight = 1.0
    ) -> StepRecord:
        """The whole step from the tensors that are there before, per device; and its times."""
        for worker, tensors in zip(self.workers, given, strict=True):
            worker.held = Held()
            for number, tensor in tensors.items():
                worker.held[number] = tensor
        self.gradients, self._weight = {}, weight
        record = self.step(step)
        for parameter, gradient in self.program.gradients.items():
            if parameter not in self.gradients:
                self.gradients[parameter] = self.value(gradient)
        return record

    def value(self, tensor: int) -> torch.Tensor:
        """A tensor that was kept."""
        found: torch.Tensor = next(w.held[tensor] for w in self.workers if tensor in w.held)
        return found

    def forget(self) -> None:
        """Drop all that the step held."""
        for worker in self.workers:
            worker.held = Held()
        self.gradients = {}

    def _run(self, worker: DeviceWorker, op: int, step: int) -> None:
        call: Call = self.program.calls[op]
        if call.phase == Phase.OPTIMIZER:
            parameter, gradient = call.args[0].number, call.args[1].number
            self.gradients[parameter] = worker.held[gradient]
            return
        run = partial(super()._run, worker, op, step)
        if worker.seed is None:
            self._redraws[worker].run(op, run)
        else:
            run()
        if starts_backward(self.program, call):
            (seed,) = (output for output in call.outputs if output is not None)
            worker.held[seed].mul_(self._weight)

    def _obey(
        self, device: int, instruction: Instruction, step: int,
        marks: dict[str, dict[int, Any]], memory: list[tuple[Any, int]],
    ) -> None:  # fmt: skip
        if instruction.do == Do.DROP and instruction.number in self._keep:
            return
        super()._obey(device, instruction, step, marks, memory)
