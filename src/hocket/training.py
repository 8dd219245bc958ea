"""``hocket.prepare``: a plan carries a person's own training loop.

train = hocket.prepare(model, optimizer, batch, on="2xv100-16g")
for batch in batches:
    loss = train.step(batch)
"""

# ruff: noqa: E402

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.api import ON_THIS_MACHINE, Planned, find_cluster, plan_graph
from hocket.api.memory import budget_of
from hocket.base.config import PLAN_VARIABLE, rank_variables
from hocket.base.errors import UsageError
from hocket.base.extras import require
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan, read_plan
from hocket.plan.sections import Communication, Memory, Priority
from hocket.plan.verify import require_structure
from hocket.planners.memory.budget import keep_budget
from hocket.planners.registry import ONE_DEVICE
from hocket.transformer import Division

require("torch", "training")

import torch
from torch import nn

from hocket.api.carried import Training
from hocket.capture.loss import MEAN, Loss
from hocket.capture.model import CaptureWarning, UntraceableError, capture
from hocket.capture.step import Forward
from hocket.graph.graph import Graph
from hocket.priority import wrap
from hocket.runtime.collectives.group import PLANNED, register
from hocket.runtime.collectives.propagation import Propagation
from hocket.runtime.executors import choose
from hocket.runtime.memory.rounding import rounded_parameters
from hocket.runtime.memory.uniform import uniform
from hocket.runtime.rebuild import require_same
from hocket.runtime.train.batches import Padding, PadTo, settled
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.carrier import Carrier
from hocket.runtime.train.divided.agreement import require_same_everywhere, share_weights
from hocket.runtime.train.divided.build import DividedTask, DivisionWarning
from hocket.runtime.train.divided.planned import carried_division, carried_plan, divides
from hocket.runtime.train.divided.prioritised import hindrance
from hocket.runtime.train.divided.shares import Count
from hocket.runtime.train.fitting import KeptBudget, fitted
from hocket.runtime.train.kept import keeping
from hocket.runtime.train.loop import LoopOptions
from hocket.runtime.train.modules import MovedModules
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.ranked import join_ranks, rank_device
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsal import rehearsed_peak_bytes
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
    count: Count | None = None,
    weights: str | Path | None = None,
) -> Training:
    """Make a plan carry the training of ``model`` by ``optimizer`` on batches like ``batch``.

    ``plan`` is a plan of this model, or its file; without it one is made for the cluster ``on``. A
    batch is a tensor, a tuple (by position) or a mapping (by keyword) of tensors, or whatever
    ``forward(model, batch)`` takes; that returns the loss, or what ``loss`` finds it in. Where
    ranks divide the batch, ``count`` says what a part of it counts, else its samples; ``weights``
    are files that a model without memory is read from, by each rank its part. The other options
    are explained in `LoopOptions`. A model that cannot be recorded op by op is placed
    module by module, with a warning that says why and what is lost.

    ``memory`` is a number of bytes ("8GiB") that training does not exceed on its one device: what
    does not fit is kept on the host or computed again, and ``train.memory`` says how.
    """
    options = LoopOptions(
        accumulate=accumulate, clip_norm=clip_norm, seed=seed, outputs=outputs,
        max_shapes=max_shapes, pad=pad, replay=replay,
    )  # fmt: skip
    _require_sensible(options)
    batch = settled(pad(batch) if pad is not None else batch)
    recipe = Recipe(
        loss=loss, forward=forward, update=planned_update(optimizer, model),
        device="cuda" if torch.cuda.is_available() else "cpu", name=type(model).__name__,
    )  # fmt: skip
    variables = rank_variables()
    if plan is None and PLAN_VARIABLE in variables:
        plan = variables[PLAN_VARIABLE]
    saved = read_plan(plan) if isinstance(plan, str | Path) else plan
    is_ranked = join_ranks(variables)
    # What is tried while recording must not change what the loop draws.
    with torch.random.fork_rng():
        if saved is not None and (isinstance(saved, Division) or divides(saved.plan)):
            device = rank_device(variables)
            propagates = _propagates(saved, model, optimizer, options, device)
            task = DividedTask(
                model=model, optimizer=optimizer, batch=batch, recipe=recipe, device=device,
                make_inner=lambda how, rows, seed: _alone(model, rows, how, options, device, seed),
                seed=seed, count=count, max_shapes=max_shapes, weights=weights,
                sums_by=None if propagates else _sums_by(saved, device), propagates=propagates,
            )  # fmt: skip
            carrier: Carrier = (
                carried_division(task, saved)
                if isinstance(saved, Division)
                else carried_plan(task, saved.problem, saved.plan)
            )
        else:
            assert not isinstance(saved, Division)
            _require_one_budget(memory, saved, is_ranked)
            if is_ranked:
                require_same_everywhere(model, rank_device(variables))
                share_weights(model, rank_device(variables))
            if memory is not None or (saved is not None and saved.plan.get(Memory) is not None):
                carrier = _budgeted(model, optimizer, batch, recipe, saved, on, memory, options)
            else:
                carrier = _carrier(model, batch, recipe, saved, on, options, is_ranked)
    train = Training(model, optimizer, carrier, options)
    train.planned = None if isinstance(saved, Division) else saved
    return train


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
        3,
    )
    return None


def _propagates(
    saved: Planned | SavedPlan | Division,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: LoopOptions,
    device: torch.device,
) -> Callable[[], Propagation] | None:
    """What lets gradients travel by priority where the plan says so and this training can."""
    if isinstance(saved, Division) or (priority := saved.plan.get(Priority)) is None:
        return None
    require_structure(saved.plan, saved.problem)
    if hindered := hindrance(model, optimizer, options, device):
        warnings.warn(
            f"the plan sends gradients by priority, and {hindered}: they are summed at the end of "
            "each step, and the numbers are the same",
            DivisionWarning,
            3,
        )
        return None
    return lambda: wrap(
        model, optimizer, crosses=priority.crosses, slice_bytes=priority.slice_bytes
    )


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
    return _carrier(model, batch, recipe, None, ON_THIS_MACHINE, options, False, alone=device)


def _require_sensible(options: LoopOptions) -> None:
    if options.accumulate < 1:
        raise UsageError(
            f"accumulate={options.accumulate} batches make no update", hint="give 1 or more"
        )
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise UsageError(
            f"clip_norm={options.clip_norm:g} leaves no gradient", hint="give a norm above 0"
        )


def _carrier(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    saved: Planned | SavedPlan | None,
    on: str | Path | Cluster,
    options: LoopOptions,
    is_ranked: bool,
    alone: torch.device | None = None,
) -> Carrier:
    """What carries the model; all on the device ``alone`` where it is given."""
    if saved is not None:
        noted = saved.problem.graph.meta.get("device")
        recipe = replace(recipe, device=noted if isinstance(noted, str) else recipe.device)
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        reason = "it makes sparse gradients, whose size depends on the data"
        dense = copy.deepcopy(model)
        for module in dense.modules():
            if getattr(module, "sparse", False) is True:
                module.sparse = False  # type: ignore[assignment]
        return _by_modules(model, dense, batch, recipe, saved, on, reason, alone)
    try:
        graph, program = recipe.trace(model, batch, "train")
    except UntraceableError as error:
        return _by_modules(
            model, model, batch, recipe, saved, on, f"{error.where}: {error.message}", alone
        )
    _warn_without_loss(graph, recipe.name, depth=4)
    saved = _planned(graph, saved, on, recipe.name, is_alone=alone is not None)
    devices = _devices(saved, alone)
    if is_ranked:
        devices = [rank_device(rank_variables())] * len(devices)
    return Programs(
        model, batch, recipe, saved.problem, saved.plan, program, devices,
        seed=options.seed, outputs=options.outputs, max_shapes=options.max_shapes,
        replay=options.replay, is_ranked=is_ranked,
    )  # fmt: skip


def _require_one_budget(
    memory: int | str | None, saved: Planned | SavedPlan | None, is_ranked: bool
) -> None:
    if memory is not None and (saved is not None or is_ranked):
        what = "a plan that is given" if saved is not None else "ranks of a launcher"
        raise UsageError(
            f"memory= makes a plan for one device, which {what} cannot follow",
            hint="leave memory= out, or plan with hocket fit and give that plan",
        )


def _budgeted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    saved: Planned | SavedPlan | None,
    on: str | Path | Cluster,
    memory: int | str | None,
    options: LoopOptions,
) -> Carrier:
    """The model within a number of bytes: the plan's memory section, or what fits ``memory``."""
    device = torch.device(recipe.device)
    budget_bytes = None if memory is None else budget_of(memory)
    if saved is not None:
        return keeping(
            model,
            optimizer,
            batch,
            recipe,
            saved.problem.graph,
            saved.plan[Memory],
            device,
            options,
        )
    assert budget_bytes is not None
    try:
        graph, program = recipe.trace(model, batch, "train")
    except UntraceableError as error:
        reason = f"{error.where}: {error.message}"
        return _leanest(model, batch, recipe, budget_bytes, device, reason)
    rounded = rounded_parameters(program)

    def rehearse(section: Memory) -> int:
        return rehearsed_peak_bytes(
            model, optimizer, batch, recipe, section, device, graph=graph, rounded=rounded,
            clips=options.clip_norm is not None, accumulate=options.accumulate,
        )  # fmt: skip

    planned = plan_graph(graph, find_cluster(on), planners=ONE_DEVICE)
    frontier = keep_budget(planned.problem, planned.plan, budget_bytes).frontier
    found = fitted(budget_bytes, frontier, rehearse)
    return Budgeted(model, batch, recipe, found, device, graph=graph, rounded=rounded)


def _leanest(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    budget_bytes: int,
    device: torch.device,
    reason: str,
) -> Carrier:
    """A model that cannot be recorded: everything streamed and recomputed, nothing rehearsed."""
    section = uniform(
        model, budget_bytes, activations="recomputed", checkpoint="offloaded",
        parameters="streamed", update="host",
    )  # fmt: skip
    lost = (
        f"{recipe.name} cannot be rehearsed, because {reason}; all is streamed and recomputed, "
        "and whether that keeps the budget shows only when it runs"
    )
    warnings.warn(lost, CaptureWarning, 4)
    return Budgeted(model, batch, recipe, KeptBudget(section, None), device, lost=lost)


def _by_modules(
    model: nn.Module,
    traceable: nn.Module,
    batch: Any,
    recipe: Recipe,
    saved: Planned | SavedPlan | None,
    on: str | Path | Cluster,
    reason: str,
    alone: torch.device | None,
) -> Carrier:
    """The model placed module by module; its step is recorded on ``traceable``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        graph = capture(
            traceable, batch, loss=recipe.loss, optimizer=recipe.update, name=recipe.name,
            device=recipe.device, forward=recipe.forward,
        )  # fmt: skip
    _warn_without_loss(graph, recipe.name, depth=5)
    saved = _planned(graph, saved, on, recipe.name, is_alone=alone is not None)
    assert saved.plan.device_of is not None
    lost = (
        f"{recipe.name} is placed by modules, not by ops, because {reason}; order, overlap of "
        "transfers and replay of the recorded step are lost, the numbers are the same"
    )
    warnings.warn(lost, CaptureWarning, 4)
    return MovedModules(
        model, recipe, graph, saved.plan.device_of, _devices(saved, alone), lost=lost
    )


def _warn_without_loss(graph: Graph, name: str, *, depth: int) -> None:
    """Training goes on, as it would for a scalar, but it is rarely what was meant."""
    if graph.meta.get("loss") == MEAN:
        warnings.warn(
            f"{name} returns no loss: training minimises the mean of its output; find the loss in "
            "it with loss=, or compute it with forward=",
            CaptureWarning,
            depth,
        )


def _planned(
    graph: Graph,
    saved: Planned | SavedPlan | None,
    on: str | Path | Cluster,
    name: str,
    *,
    is_alone: bool,
) -> Planned | SavedPlan:
    if saved is None:
        cluster = find_cluster(on)
        # Where there is one device there is nothing to compare.
        planners = ONE_DEVICE if is_alone or cluster.num_devices == 1 else ()
        return plan_graph(graph, cluster, planners=planners)
    require_same(saved.problem.graph, graph, name)
    if saved.plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    return saved


def _devices(saved: Planned | SavedPlan, alone: torch.device | None) -> list[torch.device]:
    """What carries out each device of the plan here; unused ones are with the first used one."""
    assert saved.plan.device_of is not None
    if alone is not None:
        return [alone] * len(saved.problem.cluster.devices)
    used = sorted(set(saved.plan.device_of.tolist())) or [0]
    devices = saved.problem.cluster.devices
    _, found = choose("placement", "single", [devices[device] for device in used])
    places: dict[int, str] = dict(zip(used, found, strict=True))
    rest = places[used[0]]
    return [torch.device(places.get(d, rest)) for d in range(len(devices))]
