"""Converts between the user's PyTorch optimizer and its description in a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.optimizer import Optimizer, as_optimizer


def planned_update(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """Return a plan's description of ``optimizer``: type, settings and states."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"an optimizer cannot be of type {type(optimizer).__name__!r}",
            hint="pass one of torch.optim, made from model.parameters()",
        )
    found = as_optimizer(optimizer, model)
    assert found is not None
    return found


def trained_parameters(update: Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that a described optimizer updates."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (update.only is None or name in update.only)
    ]


def torch_optimizer(update: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Create the PyTorch optimizer of a description for these parameters."""
    if update.states is not None:
        raise UsageError(
            f"a plan of {update.name} knows what it holds, not its settings",
            hint="train with hocket.prepare(model, optimizer, batch, plan=…)",
        )
    settings = update.all_settings
    if update.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if update.name == "adamw" else torch.optim.Adam
        return kind(
            parameters, lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"], weight_decay=settings["weight_decay"], fused=True,
        )  # fmt: skip
    return torch.optim.SGD(
        parameters, lr=settings["lr"], weight_decay=settings["weight_decay"],
        momentum=settings.get("momentum", 0.0),
    )  # fmt: skip
