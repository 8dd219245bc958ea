"""Batch norm over the rows of all replicas: the statistics that one process would see.

Mean and variance are sums over ranks, and their gradients are sums over ranks as well (Zhang et
al., "Context Encoding", 2018). PyTorch has this for GPUs alone, and without unequal shares.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.runtime.train.divided.collectives import summed


def join_batch_norms(model: nn.Module, group: Any) -> int:
    """Let every batch norm of a model see the rows of all ranks of a group; how many there are."""
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in found:
        # The class stays, with names and parameters; a copy of the module binds to itself.
        module.forward = MethodType(_joined(type(module).forward, group), module)  # type: ignore[method-assign]
    return len(found)


def batch_norms_in_training(model: nn.Module) -> list[str]:
    """Names of the batch norms that would normalise by the rows that they see."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


def _joined(alone: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return alone(self, x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        rows = x.new_full((1,), x.numel() // x.shape[1])
        totals = summed(torch.cat([x.sum(dims), rows]), group)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean.view(shape)
        variance = summed(centred.square().sum(dims), group) / count
        _keep_statistics(self, mean, variance, count)
        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    return forward


@torch.no_grad()
def _keep_statistics(
    norm: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
) -> None:
    if not norm.training or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    unbiased = variance * (count / (count - 1))
    if norm.momentum is None:
        rate = 1.0 / norm.num_batches_tracked.to(mean.dtype)
        norm.running_mean.add_(rate * (mean - norm.running_mean))
        norm.running_var.add_(rate * (unbiased - norm.running_var))
        return
    norm.running_mean.mul_(1 - norm.momentum).add_(norm.momentum * mean)
    norm.running_var.mul_(1 - norm.momentum).add_(norm.momentum * unbiased)
