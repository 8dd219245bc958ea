"""Accelerate with hocket: a loop of ``Accelerator`` within a memory budget, and device maps.

    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    train, optimizer = prepare(accelerator, model, optimizer, batch, memory="8GiB")
    loader, scheduler = accelerator.prepare(loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(train(batch))
            optimizer.step()
            optimizer.zero_grad()

`dispatch` places the modules of a model on the devices of a plan of ``hocket plan --planner auto``.
"""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.base.errors import UsageError
from hocket.base.extras import require

require("torch", "hocket.integrations.accelerate")

import torch
from accelerate import Accelerator, dispatch_model
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from hocket.export.accelerate import device_map as device_map_of
from hocket.plan.files import read_plan
from hocket.training import PlanLike, Training
from hocket.training import prepare as prepare_training

__all__ = ["device_map", "dispatch", "prepare"]


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    memory: int | str | None = None,
    plan: PlanLike | None = None,
    on: str | Path = "auto",
    async_update: bool = False,
) -> tuple[Training, AcceleratedOptimizer]:
    """Prepare a model and an optimizer for a loop of the Accelerator.

    The other arguments are those of `hocket.prepare`. ``train(batch)`` returns the loss under the
    Accelerator's autocast. The optimizer skips steps while gradients accumulate. Do not pass model
    or optimizer to ``accelerator.prepare``; pass loaders and schedulers as usual.
    """
    if accelerator.distributed_type != DistributedType.NO:
        raise UsageError(
            f"the Accelerator runs {accelerator.distributed_type.value}, which wraps the model",
            hint="start one process per plan: hocket launch plan.json train.py",
        )

    def under_autocast(module: nn.Module, given: Any) -> Any:
        with accelerator.autocast():
            if forward is not None:
                return forward(module, given)
            found = module(**given)
            return found["loss"] if isinstance(found, dict) else found.loss

    train = prepare_training(
        model, optimizer, batch, forward=under_autocast, memory=memory, plan=plan, on=on,
        async_update=async_update,
    )  # fmt: skip
    return train, accelerator.prepare_optimizer(optimizer, device_placement=False)


def device_map(plan: str | Path) -> dict[str, int | str]:
    """The ``device_map`` of a plan file with an op placement."""
    saved = read_plan(plan)
    return device_map_of(saved.problem, saved.plan).device_of


def dispatch(model: nn.Module, plan: str | Path) -> nn.Module:
    """Place the modules of a model on the devices of a plan file with ``dispatch_model``."""
    found: nn.Module = dispatch_model(model, device_map=device_map(plan), main_device=None)
    return found
