"""Steps of an optimizer for some of its parameters: on the host, on the device, or rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.ledger import on_host
from hocket.runtime.memory.updates import counters_beside, has_fused_kernels, part_of


class PartSteps:
    """Parts of an optimizer, by fused kernels where ``is_real``, and their steps."""

    def __init__(self, device: torch.device, *, is_real: bool, is_rehearsal: bool) -> None:
        self._device, self._is_real, self._is_rehearsal = device, is_real, is_rehearsal

    def at_home(self, optimizer: torch.optim.Optimizer, block: Block) -> torch.optim.Optimizer:
        """The part that updates a block on the host."""
        return part_of(optimizer, block.twins, fused=self._is_real)

    def here(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Of parameters on the device; fused kernels hold nothing beside what they change."""
        if self._is_real and has_fused_kernels(optimizer):
            counters_beside(optimizer, parameters)
        return part_of(optimizer, {p: p for p in parameters}, fused=self._is_real)

    def step_here(self, part: torch.optim.Optimizer) -> None:
        """An update on the device, of which a rehearsal sees what it holds."""
        is_fused = self._device.type == "cuda" and has_fused_kernels(part)
        if not (self._is_rehearsal and is_fused):
            self._step(part)

    def _step(self, part: torch.optim.Optimizer) -> None:
        # Counters of steps are read by the host, so that they are real in a rehearsal, too.
        with unset_fake_temporarily() if self._is_rehearsal else nullcontext():
            part.step()

    def make_states(self, optimizer: torch.optim.Optimizer, blocks: Iterable[Block]) -> None:
        """Have the states that come to or stay on the device, as after a first step."""
        for block in blocks:
            if block.home is None:
                for parameter in block.parameters:
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                self._step(part_of(optimizer, {p: p for p in block.parameters}))
                for parameter in block.parameters:
                    parameter.grad = None
            elif block.is_updated_here:
                with on_host():
                    for parameter, twin in block.twins.items():
                        if parameter.requires_grad:
                            twin.grad = torch.zeros_like(twin)
                    self._step(part_of(optimizer, block.twins))
                    for twin in block.twins.values():
                        twin.grad = None
