"""Sums over ranks inside a forward pass, as ops that can be recorded, with their gradients.

The two of Megatron-LM (Shoeybi et al., 2019): what all ranks hold alike and use apart has a
gradient that is summed (`spread`); what ranks hold parts of is summed, and its gradient is the same
for all (`joined`). `summed` is for statistics, whose parts come from different rows: sums both
ways.
"""

from __future__ import annotations

from typing import Any

import torch

_SUM = "sum"


def _all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    reduced: torch.Tensor = ops.wait_tensor(ops.all_reduce(tensor.contiguous(), _SUM, group))
    return reduced


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: str, both_ways: bool) -> torch.Tensor:
        context.group, context.both_ways = group, both_ways
        return _all_reduce(x, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if context.both_ways:
            gradient = _all_reduce(gradient, context.group)
        return gradient, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return _all_reduce(gradient, context.group), None


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks, whose gradient is a sum over ranks, too."""
    found: torch.Tensor = _Summed.apply(x, group.group_name, True)  # type: ignore[no-untyped-call]
    return found


def joined(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of parts, which all ranks go on with alike."""
    found: torch.Tensor = _Summed.apply(x, group.group_name, False)  # type: ignore[no-untyped-call]
    return found


def spread(x: torch.Tensor, group: Any) -> torch.Tensor:
    """What all ranks have alike, before each uses it for its own part."""
    found: torch.Tensor = _Spread.apply(x, group.group_name)  # type: ignore[no-untyped-call]
    return found
