"""The optimizer of ``torch.optim`` that a captured update stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.optimizer import Optimizer, as_optimizer

# What a plan assumes of the user's optimizer: which parameters, and what it keeps of each.
#
# The optimizer itself does the updates, so one that capture does not know is planned by its
# states.


def planned_update(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """The update that stands for ``optimizer`` in a plan."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"an optimizer cannot be of type {type(optimizer).__name__!r}",
            hint="pass one of torch.optim, made from model.parameters()",
        )
    found = as_optimizer(optimizer, model)
    assert found is not None
    return found


# The optimizer of ``torch.optim`` that a captured update stands for.


def trained_parameters(update: Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of a model that a captured update changes."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (update.only is None or name in update.only)
    ]


def torch_optimizer(update: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that makes a captured update of these parameters."""
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
