"""Run a traced Program on real tensors, to test that the trace is complete.

Tensors are freed after their last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hocket.capture.fake import all_tensors
from hocket.capture.perform import BoundCall, Tensors, draw_seed, seed_device
from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.storage import first_tensors, storage_bytes
from hocket.graph import Role


@dataclass(frozen=True, eq=False)
class Executed:
    """Results of a program."""

    outputs: tuple[torch.Tensor, ...]
    """The loss in training, all model outputs in inference."""
    gradients: dict[str, torch.Tensor]
    """Gradients by parameter name."""
    state: dict[str, torch.Tensor]
    """Parameters, buffers and optimizer state after the step."""


def named_tensors(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Tensors of a real model and batch by the names that a Program uses."""
    return {name: tensor for name, _, tensor in all_tensors(model, batch)}


def perform(call: Call, known: Tensors, step: int, device: torch.device | None = None) -> None:
    """Run a call, or the update of ``torch.optim`` that it stands for.

    ``step`` counts from 1: optimizers correct the bias of their first steps.
    """
    if not isinstance(call.function, str):
        BoundCall(call, device).perform(known)
        return
    _UPDATES[call.function](step, *(known[ref.number] for ref in call.args), **call.kwargs)
    for before, after in zip(call.targets, call.written, strict=True):
        known[after] = known[before]


def given_storages(
    numbers: Iterable[int],
    specs: Mapping[int, TensorSpec],
    names: Mapping[int, str],
    values: Mapping[str, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Bytes of each storage, by number, behind those tensors that have a value."""
    found: dict[int, torch.Tensor] = {}
    for number in numbers:
        spec, name = specs[number], names[number]
        if name in values:
            found.setdefault(spec.storage, storage_bytes(values[name], spec.storage_bytes))
        elif spec.storage not in found and spec.role != Role.OPTIMIZER_STATE:
            raise ValueError(f"no tensor given for {name!r}")
    return found


def execute(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    order: Sequence[int] | None = None,
    *,
    step: int = 1,
    seed: int | None = None,
) -> Executed:
    """Run every call in recorded order or in ``order``, without changing ``tensors``.

    ``step`` counts from 1. With a ``seed``, each random draw has its own seed (see `draw_seed`);
    without one, draws continue from the current state of PyTorch's generators.
    """
    specs = dict(enumerate(program.tensors))
    storages = given_storages(program.names, specs, program.names, tensors)
    device = next(iter(tensors.values())).device
    known = first_tensors(program.names, specs, storages, device)
    kept = {*program.outputs, *program.gradients.values(), *program.names}
    num_readers = [0] * len(program.tensors)
    for call in program.calls:
        for tensor in call.reads:
            num_readers[tensor] += 1
    draws = program.draws
    # No tensor here requires a gradient; some kernels save less where gradients are switched off,
    # and their backward calls would miss it.
    with torch.enable_grad():
        for index in range(len(program.calls)) if order is None else order:
            call = program.calls[index]
            if seed is not None and index in draws:
                seed_device(next(iter(known.values())).device, draw_seed(seed, step, draws[index]))
            perform(call, known, step)
            for tensor in call.reads:
                num_readers[tensor] -= 1
            made = (tensor for tensor in (*call.outputs, *call.written) if tensor is not None)
            for tensor in (*call.reads, *made):
                if num_readers[tensor] == 0 and tensor not in kept:
                    known.pop(tensor, None)
    return Executed(
        outputs=tuple(known[tensor] for tensor in program.outputs),
        gradients={program.names[p]: known[g] for p, g in program.gradients.items()},
        state={
            name: known[tensor]
            for tensor, name in program.names.items()
            if program.tensors[tensor].role != Role.INPUT
        },
    )


# ── updates ─────────────────────────────────────────────────────────────────────────────────────


def _adamw(
    step: int,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    *,
    fused: Callable[..., None] = torch._fused_adamw_,
    **settings: float,
) -> None:
    tensors = [parameter, gradient, mean, square]
    dense = tensors if _march_in_step(tensors) else [t.contiguous() for t in tensors]
    count = torch.full((), float(step), device=parameter.device)
    fused(
        [dense[0]], [dense[1]], [dense[2]], [dense[3]], [], [count],
        amsgrad=False, maximize=False, **settings,
    )  # fmt: skip
    for tensor, updated in zip(tensors, dense, strict=True):
        if updated is not tensor and tensor is not gradient:
            tensor.copy_(updated)


def _march_in_step(tensors: Sequence[torch.Tensor]) -> bool:
    """True if all tensors are dense and have equal strides, so a linear walk over memory visits the
    same elements in each.

    The fused optimizer kernel walks memory this way, whatever the strides are.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return all(tensor.permute(order).is_contiguous() for tensor in tensors)


_adam = partial(_adamw, fused=torch._fused_adam_)


def _sgd(
    step: int,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    buffer: torch.Tensor | None = None,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
) -> None:
    if weight_decay:
        gradient = gradient.add(parameter, alpha=weight_decay)
    if buffer is not None:
        gradient = buffer.mul_(momentum).add_(gradient)
    parameter.add_(gradient, alpha=-lr)


_UPDATES: dict[str, Callable[..., None]] = {
    "optimizer.adamw": _adamw,
    "optimizer.adam": _adam,
    "optimizer.sgd": _sgd,
    "optimizer.sgd-momentum": _sgd,
}
