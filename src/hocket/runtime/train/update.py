"""What a plan assumes of a person's optimizer: which parameters, and how many states of each.

The optimizer itself does the updates, so one that capture does not know is planned as one that
keeps as much.
"""

from __future__ import annotations

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.optimizer import Optimizer, as_optimizer, updated_names

_NUM_STATES = {"SGD": 0, "Adagrad": 1, "ASGD": 1, "RMSprop": 1, "Adafactor": 0}
"""Tensors of a parameter's size that optimizers keep, where it is not two; without momentum."""
_BY_STATES = ("sgd", "sgd-momentum", "adamw")
_MOST_STATES = 2


def planned_update(optimizer: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    """The update that stands for ``optimizer`` in a plan."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"an optimizer cannot be of type {type(optimizer).__name__!r}",
            hint="pass one of torch.optim, made from model.parameters()",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS computes the loss several times per update, which a plan does not",
            hint="use another optimizer of torch.optim",
        )
    only = updated_names(optimizer, model)
    try:
        known = as_optimizer(optimizer, model)
    except UsageError:
        known = None
    return known or Optimizer(_stand_in(optimizer), only=only)


def _stand_in(optimizer: torch.optim.Optimizer) -> str:
    num_states = _NUM_STATES.get(type(optimizer).__name__, _MOST_STATES)
    if any(group.get("momentum") for group in optimizer.param_groups):
        num_states += 1
    return _BY_STATES[min(num_states, _MOST_STATES)]
