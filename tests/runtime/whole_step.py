"""A placed step that also runs the program's own updates, on copies of the given tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from runtime.executed_program import given_storages, perform

from hocket.capture.storage import first_tensors
from hocket.graph.graph import Phase
from hocket.runtime.device_instructions import Setup
from hocket.runtime.placed_step import PlacedStep
from hocket.runtime.step_record import StepRecord


class WholeStep(PlacedStep):
    """Steps from the first values of all tensors, without a user's model and optimizer."""

    def __init__(
        self, setup: Setup, values: Mapping[str, torch.Tensor], devices: Sequence[torch.device],
        *, seed: int | None,
    ) -> None:  # fmt: skip
        super().__init__(setup, dict(enumerate(devices)), seed=seed)
        specs, names = dict(enumerate(self.program.tensors)), self.program.names
        self._first = [
            first_tensors(present, specs, given_storages(present, specs, names, values), device)
            for present, device in zip(setup.split.present, devices, strict=True)
        ]

    def step(self, number: int) -> StepRecord:
        """Run one step; they count from 1."""
        record = self.run(self._first, number)
        if self.program.gradients:
            record.loss = float(self.value(self.program.outputs[0]))
        return record

    def results(self) -> dict[int, torch.Tensor]:
        """Return all tensors that are held after a step, each from the device that owns it."""
        found: dict[int, torch.Tensor] = {}
        for held in reversed(self.held.values()):
            found |= held
        for device, present in enumerate(self.setup.split.present):
            found |= {t: self.held[device][t] for t in present if t in self.held[device]}
        return found

    def _perform(self, device: int, op: int) -> None:
        call, own = self.program.calls[op], self._calls[device]
        if call.phase == Phase.OPTIMIZER:
            perform(call, self.held[device], own.draw, own.device)
        else:
            super()._perform(device, op)

    def _take_gradients(self) -> None:
        """Leave gradients where they are: updates have used them."""
