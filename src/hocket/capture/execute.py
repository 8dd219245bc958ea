"""Run a Program on real tensors, to prove that a recording is complete.

Tensors are freed after their last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.capture.fake import all_tensors
from hocket.capture.perform import BoundCall, draw_seed, seed_device
from hocket.capture.program import Program
from hocket.capture.storage import first_tensors, given_storages
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
            BoundCall(call).perform(known, step)
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
