"""Clip gradients by the norm of those of all ranks, each of which is counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def clip_everywhere(
    parameters: Sequence[nn.Parameter],
    counts: Callable[[nn.Parameter], bool],
    max_norm: float,
    device: torch.device,
) -> None:
    """Scale gradients so that the norm of all is at most ``max_norm``, as one process would.

    ``counts`` says whether a gradient that several ranks have is counted here. Squares are summed
    in double precision, since ranks sum them in another order than one process.
    """
    square = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and counts(parameter):
            here = _local(parameter.grad)
            square += torch.linalg.vector_norm(here, dtype=torch.float64).square()
    dist.all_reduce(square)
    scale = torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            here = _local(parameter.grad)
            here.mul_(scale.to(here.dtype))


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
