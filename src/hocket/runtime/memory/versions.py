"""Notice writes to parameters by others, fused optimizers included."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

own_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers of single blocks, whose steps are not somebody else's."""
_num_fused_steps = 0


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers that change when somebody else writes to the tensors.

    Fused optimizers do not move PyTorch's version counters, so their steps are counted.
    """
    return [_num_fused_steps, *(tensor._version for tensor in tensors)]


def count_fused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step of somebody else's fused optimizer; a hook after every optimizer's step."""
    global _num_fused_steps
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and optimizer not in own_optimizers:
        _num_fused_steps += 1


register_optimizer_step_post_hook(count_fused)
