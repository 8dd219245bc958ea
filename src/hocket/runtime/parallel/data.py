"""Data parallelism: who holds which part of the weights, and how gradients become one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hocket.runtime.parallel.refusals import DataProgram


def shard_part(module: nn.Module, mesh: DeviceMesh, data: DataProgram) -> nn.Module:
    """Divide one part of a stage where weights are divided, else leave it."""
    if data.kind == "fsdp":
        fully_shard(module, mesh=mesh, reshard_after_forward=data.reshards)
    return module


def wrap_stage(stage: nn.Module, mesh: DeviceMesh, data: DataProgram) -> nn.Module:
    """The stage as the pipeline sees it."""
    if data.kind == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    return shard_part(stage, mesh, data)


def reduce_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average gradients over the data-parallel ranks, all of one type in one message."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=mesh.get_group())
        flat /= mesh.size()
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))


def settle_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Lay gradients out as their parameters are; autograd leaves some whole and some as sums.

    A gradient that is not there becomes zeros, so that all ranks go on together: the names of
    such parameters.
    """
    missing = []
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            missing.append(name)
            parameter.grad = torch.zeros_like(parameter)
        elif isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    return missing


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece; all ranks that share it must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_name(name: str) -> str:
    """The name of a parameter in the model, without what wrappers add."""
    return name.removeprefix("module.")
