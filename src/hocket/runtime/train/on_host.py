"""The optimizer's update on the host: its state and a twin of every parameter live there.

ZeRO-Offload (Ren et al., 2021): gradients are copied to the host when all are there, the person's
own optimizer updates the twins, and parameters are copied back. The device holds no state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from hocket.runtime.memory.updates import part_of
from hocket.runtime.memory.versions import versions_of

_HOST = torch.device("cpu")


class _Twin(NamedTuple):
    """A parameter's copy on the host, and what the parameter was when they were the same."""

    parameter: nn.Parameter
    versions: list[int]
    address: int


class HostUpdate:
    """Makes steps of an optimizer on the host."""

    def __init__(self) -> None:
        self._twins: dict[nn.Parameter, _Twin] = {}

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """One step with the gradients that parameters have."""
        trained = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        twins = {parameter: self._twin(parameter) for parameter in trained}
        for parameter, twin in twins.items():
            twin.grad = parameter.grad.to(_HOST)
            _bring_home(optimizer.state[parameter])
        part_of(optimizer, twins, fused=True).step()
        for parameter, twin in twins.items():
            twin.grad = None
            parameter.detach().copy_(twin.detach())
            self._twins[parameter] = _Twin(twin, versions_of([parameter]), parameter.data_ptr())
        # Schedulers look whether it was called.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _twin(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._twins.get(parameter)
        now = versions_of([parameter]), parameter.data_ptr()
        if known is not None and (known.versions, known.address) == now:
            return known.parameter
        return nn.Parameter(parameter.detach().to(_HOST, copy=True))


def _bring_home(state: dict[str, object]) -> None:
    """States that a checkpoint has put to the device."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device != _HOST:
            state[key] = value.to(_HOST)
