"""``hocket.prepare``: a plan carries a person's own training loop.

train = hocket.prepare(model, optimizer, batch, on="2xv100-16g")
for batch in batches:
    loss = train.step(batch)
"""

# ruff: noqa: E402

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.api import ON_THIS_MACHINE, Planned, find_cluster
from hocket.base.config import PLAN_VARIABLE, rank_variables
from hocket.base.errors import UsageError
from hocket.base.extras import require
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan, read_plan
from hocket.plan.plan import Plan
from hocket.plan.sections import Communication, Memory, Priority
from hocket.plan.verify import require_structure
from hocket.transformer import Division

require("torch", "training")

import torch
from torch import nn

from hocket.api.carried import Training
from hocket.api.carriers import Prepared, budgeted_carrier, placed_carrier
from hocket.capture.fake import model_tensors
from hocket.capture.given import first_batch, refuse_ranks, supervised, unwrapped
from hocket.capture.loss import Loss
from hocket.capture.step import Forward
from hocket.capture.swap import generators_kept
from hocket.priority import wrap
from hocket.runtime.collectives.group import PLANNED, register
from hocket.runtime.collectives.propagation import Propagation
from hocket.runtime.train.batches import Padding, PadTo, settled
from hocket.runtime.train.carrier import Carrier
from hocket.runtime.train.compiled import CompiledModel
from hocket.runtime.train.divided.agreement import require_same_everywhere, share_weights
from hocket.runtime.train.divided.build import DividedTask, DivisionWarning
from hocket.runtime.train.divided.planned import carried_division, carried_plan, divides
from hocket.runtime.train.divided.prioritised import hindrance
from hocket.runtime.train.divided.shares import Count
from hocket.runtime.train.forwards import taken_over
from hocket.runtime.train.loop import LoopOptions
from hocket.runtime.train.predicted import claimed_step_s
from hocket.runtime.train.ranked import join_ranks, rank_device
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.update import planned_update

__all__ = ["PadTo", "Training", "prepare"]

PlanLike = str | Path | Planned | SavedPlan | Division
"""A plan with its problem, the file of one, or the degrees of a division."""


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    plan: PlanLike | None = None,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    memory: int | str | None = None,
    loss: Loss | str | None = None,
    forward: Forward | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    seed: int | None = None,
    outputs: bool = False,
    max_shapes: int = 8,
    pad: Padding | None = None,
    replay: bool = True,
    async_update: bool = False,
    count: Count | None = None,
    weights: str | Path | None = None,
    compiled: bool | str = False,
    reduce_dtype: torch.dtype | None = None,
) -> Training:
    """Make a plan carry the training of ``model`` by ``optimizer`` on batches like ``batch``.

    ``plan`` is a plan of this model, or its file; without it one is made for the cluster ``on``. A
    batch is a tensor, a tuple (by position) or a mapping (by keyword) of tensors, or whatever
    ``forward(model, batch)`` takes; that returns the loss, or what ``loss`` finds it in. Where
    ranks divide the batch, ``count`` says what a part of it counts, else its samples; ``weights``
    are files that a model without memory is read from, by each rank its part. The other options
    are explained in `LoopOptions`. A model that cannot be recorded op by op is placed
    module by module, with a warning that says why and what is lost.

    ``memory`` is a budget ("8GiB") that training does not exceed on its one device: what does not
    fit is offloaded to the host or recomputed, and ``train.memory`` says how. When a step returns,
    all parameters have their updates; with ``async_update`` those on the host run into the next
    step, which is faster.

    Replicas sum gradients in the gradients' own dtype, as DistributedDataParallel does, or in
    ``reduce_dtype``, such as ``torch.float32`` for a model in bfloat16.

    ``compiled`` trains on the one device that is here by kernels of ``torch.compile`` (of its
    backend of that name), without a plan; on a GPU a step of them is launched as a whole.
    """
    options = LoopOptions(
        accumulate=accumulate, clip_norm=clip_norm, seed=seed, outputs=outputs,
        max_shapes=max_shapes, pad=pad, replay=replay, async_update=async_update,
    )  # fmt: skip
    _require_sensible(options)
    refuse_ranks(model)
    model, batch = unwrapped(model), first_batch(batch)
    loss, forward = supervised(model, batch, loss, forward)
    batch = settled(pad(batch) if pad is not None else batch)
    variables = rank_variables()
    if plan is None and PLAN_VARIABLE in variables:
        plan = variables[PLAN_VARIABLE]
    saved = read_plan(plan) if isinstance(plan, str | Path) else plan
    # What is recorded needs the model's own forwards, also where no plan keeps its limits.
    with taken_over(model), generators_kept():
        recipe = Recipe(
            loss=loss, forward=forward, update=planned_update(optimizer, model),
            device="cuda" if torch.cuda.is_available() else "cpu", name=type(model).__name__,
        )  # fmt: skip
        is_ranked = join_ranks(variables)
        if compiled:
            _require_alone(saved, memory, is_ranked)
            carrier: Carrier = CompiledModel(
                model, recipe, torch.device(recipe.device), replay=replay,
                backend="inductor" if compiled is True else compiled,
            )  # fmt: skip
            train = Training(model, optimizer, carrier, options)
            train.plan = Plan(planner="compiled")
            return train
        _require_one_budget(memory, saved, is_ranked)
        # What is tried while recording must not change what the loop draws.
        with torch.random.fork_rng():
            if isinstance(saved, Division) or (saved is not None and divides(saved.plan)):
                task = _divided_task(
                    model, optimizer, batch, recipe, saved, options, rank_device(variables),
                    count=count, weights=weights, reduce_dtype=reduce_dtype,
                )  # fmt: skip
                if isinstance(saved, Division):
                    named = Plan(planner="division", notes={"how": repr(saved)})
                    prepared = Prepared(carried_division(task, saved), named, None)
                else:
                    carrier = carried_plan(task, saved.problem, saved.plan)
                    step_s = carrier.predicted_s or claimed_step_s(saved.problem, saved.plan)
                    prepared = Prepared(carrier, saved.plan, step_s)
            else:
                _require_memory(model)
                if is_ranked:
                    require_same_everywhere(model, rank_device(variables))
                    share_weights(model, rank_device(variables))
                if memory is not None or (saved is not None and saved.plan.get(Memory) is not None):
                    prepared = budgeted_carrier(
                        model, optimizer, batch, recipe, saved, on, memory, options
                    )
                else:
                    prepared = placed_carrier(model, batch, recipe, saved, on, options, is_ranked)
        if prepared.advice:
            logging.getLogger("hocket").warning(prepared.advice)
        train = Training(model, optimizer, prepared.carrier, options)
        train.plan, train.predicted_step_s = prepared.plan, prepared.step_s
        train.advice, train.correction = prepared.advice, prepared.correction
        train.planned = None if isinstance(saved, Division) else saved
        return train


def _divided_task(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    saved: Planned | SavedPlan | Division,
    options: LoopOptions,
    device: torch.device,
    *,
    count: Count | None,
    weights: str | Path | None,
    reduce_dtype: torch.dtype | None,
) -> DividedTask:
    """A training that ranks share, of which this one has the device."""
    propagates = _propagates(saved, model, optimizer, options, reduce_dtype)
    return DividedTask(
        model=model, optimizer=optimizer, batch=batch, recipe=recipe, device=device,
        make_inner=lambda how, rows, drawn: _alone(model, rows, how, options, device, drawn),
        seed=options.seed, count=count, max_shapes=options.max_shapes, weights=weights,
        sums_by=None if propagates else _sums_by(saved, device), sums_in=reduce_dtype,
        propagates=propagates,
    )  # fmt: skip


def _require_memory(model: nn.Module) -> None:
    """Only ranks that share a model fill in weights without memory."""
    hollow = [name for name, _, tensor in model_tensors(model) if tensor.is_meta]
    if hollow:
        raise UsageError(
            f"{hollow[0]} is on the meta device and has no memory",
            hint="build the model outside of torch.device('meta'), or model.to_empty(device='cpu') "
            "and load its weights",
        )


def _require_alone(saved: object, memory: object, is_ranked: bool) -> None:
    if saved is not None or memory is not None or is_ranked:
        raise UsageError(
            "compiled steps are for a model that fits on one device, without a plan",
            hint="leave out compiled=, or the plan, the limit of memory or the other ranks",
        )


def _sums_by(saved: Planned | SavedPlan | Division, device: torch.device) -> str | None:
    """What sums gradients: trees over the links where the plan says how they travel."""
    if isinstance(saved, Division) or saved.plan.get(Communication) is None:
        return None
    if device.type == "cpu":
        register(find_cluster)
        return PLANNED
    warnings.warn(
        "the plan has an exchange of its own for these links, and GPUs exchange gradients by NCCL",
        DivisionWarning,
        4,
    )
    return None


def _propagates(
    saved: Planned | SavedPlan | Division,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: LoopOptions,
    reduce_dtype: torch.dtype | None,
) -> Callable[[], Propagation] | None:
    """What lets gradients travel by priority where the plan says so and this training can."""
    if isinstance(saved, Division) or (priority := saved.plan.get(Priority)) is None:
        return None
    require_structure(saved.plan, saved.problem)
    if hindered := hindrance(model, optimizer, options):
        warnings.warn(
            f"the plan sends gradients by priority, and {hindered}: they are summed at the end of "
            "each step, and the numbers are the same",
            DivisionWarning,
            4,
        )
        return None
    return lambda: wrap(
        model, optimizer, crosses=priority.crosses, slice_bytes=priority.slice_bytes,
        dtype=reduce_dtype,
    )  # fmt: skip


def _alone(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    options: LoopOptions,
    device: torch.device,
    seed: int | None,
) -> Carrier:
    """The model on the device of this rank alone; who shares a batch out seeds draws itself."""
    options = replace(options, seed=seed)
    return placed_carrier(
        model, batch, recipe, None, ON_THIS_MACHINE, options, False, alone=device
    ).carrier


def _require_sensible(options: LoopOptions) -> None:
    if options.accumulate < 1:
        raise UsageError(
            f"accumulate={options.accumulate} batches make no update", hint="give 1 or more"
        )
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise UsageError(
            f"clip_norm={options.clip_norm:g} leaves no gradient", hint="give a norm above 0"
        )


def _require_one_budget(
    memory: int | str | None, saved: Planned | SavedPlan | Division | None, is_ranked: bool
) -> None:
    if memory is not None and (saved is not None or is_ranked):
        what = "a plan that is given" if saved is not None else "ranks of a launcher"
        raise UsageError(
            f"memory= makes a plan for one device, which {what} cannot follow",
            hint="leave memory= out, and give a plan that keeps the limit: hocket fit and hocket "
            "waves make one with --memory",
        )
