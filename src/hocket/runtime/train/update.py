"""What a plan assumes of the user's optimizer: which parameters, and what it keeps of each.

The optimizer itself does the updates, so one that capture does not know is planned by its states.
"""

from __future__ import annotations

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.optimizer import Optimizer, as_optimizer


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
