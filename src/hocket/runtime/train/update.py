"""What a plan assumes of a person's optimizer: which parameters, and how many states of each.

The optimizer itself does the updates, so one that capture does not know is planned as one that
keeps as much.
"""

from __future__ import annotations

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.optimizer import Optimizer, as_optimizer

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
    try:
        known = as_optimizer(optimizer, model)
        assert known is not None
        return known
    except UsageError as error:
        if "not the model's" in error.message:
            raise
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    if not updated <= set(names.values()):
        raise UsageError(
            f"{type(optimizer).__name__} updates parameters that are not the model's",
            hint="make the optimizer from model.parameters()",
        )
    only = frozenset(name for name, number in names.items() if number in updated)
    return Optimizer(_stand_in(optimizer), only=None if len(only) == len(names) else only)


def _stand_in(optimizer: torch.optim.Optimizer) -> str:
    num_states = _NUM_STATES.get(type(optimizer).__name__, _MOST_STATES)
    if any(group.get("momentum") for group in optimizer.param_groups):
        num_states += 1
    return _BY_STATES[min(num_states, _MOST_STATES)]
