"""Run a Program on real tensors: the proof that a recording is complete.

Calls run in recorded order and tensors are dropped after their last reader. The updates are those of
``torch.optim`` with its default settings, at the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.capture.fake import batch_tensors, model_tensors
from hocket.capture.program import Call, Program
from hocket.capture.recording import Constant, Ref, flat_results, map_tree
from hocket.errors import UsageError
from hocket.graph import Role


@dataclass(frozen=True, eq=False)
class Executed:
    """What a program computed."""

    outputs: tuple[torch.Tensor, ...]
    """The loss in training, all results in inference."""
    gradients: dict[str, torch.Tensor]
    """By the name of their parameter."""
    state: dict[str, torch.Tensor]
    """Parameters, buffers and optimizer states after the step."""


def named_tensors(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a real model and batch under the names that a Program uses."""
    tensors = {name: tensor for name, _, tensor in model_tensors(model)}
    return tensors | dict(batch_tensors(batch))


@torch.enable_grad()
def execute(program: Program, tensors: Mapping[str, torch.Tensor]) -> Executed:
    """Run every call; ``tensors`` are not changed."""
    known = _sources(program, tensors)
    last_reader = _last_readers(program)
    for index, call in enumerate(program.calls):
        _run(call, known)
        for tensor in last_reader[index]:
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


def _sources(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    known: dict[int, torch.Tensor] = {}
    for number, name in program.names.items():
        spec = program.tensors[number]
        if spec.layout is None:
            continue
        if spec.alias_of >= 0:
            base = known[spec.alias_of]
            shape, stride, offset = spec.layout[:3]
            known[number] = torch.as_strided(base, shape, stride, offset)
        elif name in tensors:
            known[number] = tensors[name].detach().clone()
        elif spec.role == Role.OPTIMIZER_STATE:
            device = next(iter(known.values())).device
            known[number] = torch.zeros(spec.layout.shape, dtype=spec.layout.dtype, device=device)
        else:
            raise UsageError(f"no tensor given for {name!r}", hint="see named_tensors")
    return known


def _last_readers(program: Program) -> list[list[int]]:
    """Per call, the tensors that nothing needs afterwards."""
    kept = {*program.outputs, *program.gradients.values(), *program.names}
    last = {tensor: spec.producer for tensor, spec in enumerate(program.tensors)}
    for index, call in enumerate(program.calls):
        last |= dict.fromkeys(call.reads, index)
    by_call: list[list[int]] = [[] for _ in program.calls]
    for tensor, index in last.items():
        if tensor not in kept and index >= 0:
            by_call[index].append(tensor)
    return by_call


def _run(call: Call, known: dict[int, torch.Tensor]) -> None:
    def given(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return known[leaf.index]
        return leaf.tensor if isinstance(leaf, Constant) else leaf

    args, kwargs = map_tree(call.args, given), map_tree(call.kwargs, given)
    if isinstance(call.function, str):
        _UPDATES[call.function](*args)
    else:
        results = flat_results(call.function(*args, **kwargs))
        for tensor, result in zip(call.outputs, results, strict=True):
            if tensor is not None:
                known[tensor] = result
    for before, after in zip(call.targets, call.written, strict=True):
        known[after] = known[before]


def _adamw(
    parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor
) -> None:
    torch._fused_adamw_(
        [parameter], [gradient], [mean], [square], [], [torch.ones((), device=parameter.device)],
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8, amsgrad=False,
        maximize=False,
    )  # fmt: skip


def _sgd(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.add_(gradient, alpha=-1e-3)


_UPDATES = {"optimizer.adamw": _adamw, "optimizer.sgd": _sgd}
