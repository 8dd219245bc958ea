"""What carries a training of `hocket.prepare`: ops as a plan places them, modules, or a budget.

A model whose step can be recorded is placed op by op; one that cannot is placed module by module,
with a warning that says why and what is lost. A number of bytes is kept by a rehearsed plan.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.api.memory import (
    BudgetWarning,
    budget_of,
    require_memory,
    require_one_device,
    unusable_note,
)
from hocket.api.planned import (
    ON_THIS_MACHINE,
    Planned,
    find_cluster,
    launched,
    make_problem,
    plan_graph,
)
from hocket.api.several_processes import faster_with_processes
from hocket.base.config import rank_variables
from hocket.base.errors import UsageError
from hocket.base.progress import Progress, progress
from hocket.base.units import format_bytes
from hocket.capture.loss import MEAN
from hocket.capture.model import CaptureWarning, UntraceableError, capture
from hocket.capture.unseen import hooked_modules
from hocket.cost.calibrate import Calibration
from hocket.cost.dispatch import measure_host_overhead
from hocket.cost.efficiency import KindFit
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.memory.frontier import Frontier, find_frontier
from hocket.planners.placement.one_device import ONE_DEVICE, on_one_device
from hocket.runtime.executors import choose
from hocket.runtime.memory.allocator import expand_segments
from hocket.runtime.memory.host_rates import rated_here
from hocket.runtime.memory.logits import can_be_in_chunks
from hocket.runtime.memory.uniform import uniform
from hocket.runtime.rebuild import require_same
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.carrier import Carrier
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.kept import planned_budget_carrier
from hocket.runtime.train.known_plans import known_plan
from hocket.runtime.train.loop import LoopOptions
from hocket.runtime.train.modules import MovedModules
from hocket.runtime.train.plan_correction import PlanCorrection
from hocket.runtime.train.predicted import are_played, claimed_step_s
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.ranked import rank_device
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsed import rehearsals_of


class Prepared(NamedTuple):
    """What executes a training, the plan that it executes, and what that was predicted to take."""

    carrier: Carrier
    plan: Plan
    step_s: float | None
    """Predicted on the plan's devices, also where others play them; None where nobody knows."""
    advice: str = ""
    """A shorter plan that needs several processes, in one line."""
    correction: PlanCorrection | None = None
    """What may have another memory plan go on after the first steps."""


def placed_carrier(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    saved: Planned | SavedPlan | None,
    on: str | Path | Cluster,
    options: LoopOptions,
    is_ranked: bool,
    alone: torch.device | None = None,
) -> Prepared:
    """What executes the model; all on the device ``alone`` where it is given."""
    is_given = saved is not None
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
        return _by_modules(model, model, batch, recipe, saved, on, _told(error), alone)
    _warn_without_loss(graph, recipe.name, depth=4)
    _warn_of_hooks(model)
    saved = _planned(graph, saved, on, recipe.name, is_alone=alone is not None)
    devices = _devices(saved, alone)
    if is_ranked:
        devices = [rank_device(rank_variables())] * len(devices)
    carrier = Programs(
        model, batch, recipe, saved.problem, saved.plan, program, devices,
        seed=options.seed, outputs=options.outputs, max_shapes=options.max_shapes,
        replay=options.replay, is_ranked=is_ranked,
    )  # fmt: skip
    advice = ""
    is_alone = is_ranked or alone is not None or saved.problem.cluster.num_devices == 1
    if isinstance(saved, Planned) and not is_given and not is_alone:
        advice = faster_with_processes(
            saved, batch, lambda other: recipe.trace(model, other, "train")[0]
        )
    return Prepared(carrier, saved.plan, claimed_step_s(saved.problem, saved.plan), advice)


def budgeted_carrier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    saved: Planned | SavedPlan | None,
    on: str | Path | Cluster,
    memory: int | str | None,
    options: LoopOptions,
) -> Prepared:
    """The model within a memory budget: the plan's memory section, or what fits ``memory``."""
    device = torch.device(recipe.device)
    if reason := expand_segments(device):
        warnings.warn(
            "allocated bytes keep the budget, but reserved memory may exceed it, because PyTorch's "
            f"allocator has no expandable segments: {reason}; set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch "
            "2.10) before the program starts",
            BudgetWarning,
            4,
        )
    if saved is not None:
        kept = planned_budget_carrier(
            model, optimizer, batch, recipe, saved.problem, saved.plan, device, options
        )
        return Prepared(kept, saved.plan, claimed_step_s(saved.problem, saved.plan))
    assert memory is not None, "a budget is given, or a plan that has one"
    with progress(f"hocket: {recipe.name} within {format_bytes(budget_of(memory))}") as doing:
        return _chosen_budget_carrier(
            model, optimizer, batch, recipe, on, budget_of(memory), options, doing
        )


def _chosen_budget_carrier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    on: str | Path | Cluster,
    budget_bytes: int,
    options: LoopOptions,
    doing: Progress,
) -> Prepared:
    """The fastest memory plan that keeps a budget, known from before or found now."""
    device = torch.device(recipe.device)
    doing.stage("trace the step")
    try:
        rehearsals = rehearsals_of(model, optimizer, batch, recipe, device, options)
    except UntraceableError as error:
        _require_arguments(model, batch, recipe)
        lean = _leanest(
            model, batch, recipe, budget_bytes, device, _told(error),
            async_update=options.async_update,
        )  # fmt: skip
        return Prepared(lean, Plan(planner="memory").having(lean.kept.section), None)
    _warn_without_loss(rehearsals.graph, recipe.name, depth=6)
    graph, cluster = rehearsals.graph, find_cluster(on)
    if on != ON_THIS_MACHINE:
        require_one_device(cluster)
    problem = make_problem(graph, cluster)
    # The plain step may hold more than any device has: memory plans are for that.
    alone = on_one_device(problem)
    _require_room(problem, alone, budget_bytes)
    is_update_alone = options.clip_norm is None and options.accumulate == 1

    @cache
    def frontier() -> Frontier:
        doing.stage("measure this machine")
        rated = rated_here(cluster, device) if on == ON_THIS_MACHINE else cluster
        host = _measured_host(device, cluster) if on == ON_THIS_MACHINE else None
        doing.stage(f"simulate memory plans of {graph.num_ops:,} ops")
        is_replayed = not rehearsals.launches(budget_bytes).refusal and is_update_alone
        timed = make_problem(graph, rated, calibration=host)
        return find_frontier(
            timed, on_one_device(timed), in_chunks=can_be_in_chunks(model, graph),
            replayed=launched(make_problem(graph, rated), "replayed") if is_replayed else None,
            async_update=options.async_update,
        )  # fmt: skip

    known = known_plan(rehearsals, problem, budget_bytes, rehearsals.beside_bytes)
    recalled = known.recall()
    if recalled is None:
        plans = frontier()
        doing.stage("run the fastest plans dry")
        found, is_confirmed = rehearsals.fastest_that_keeps(budget_bytes, plans), False
        known.keep(found, is_confirmed=False)
    else:
        found, is_confirmed = recalled
    plan = alone.having(found.section).claiming(step_s=found.step_s)
    if are_played(problem, alone, device):
        found = found._replace(step_s=None)
    doing.stage("move parameters to where they are kept")
    carrier = rehearsals.carrier(found)
    correction = None
    is_predicted = found.step_s is not None and is_update_alone
    if device.type == "cuda" and is_predicted and not is_confirmed:
        confirm = partial(known.keep, is_confirmed=True)
        correction = PlanCorrection(rehearsals, frontier, carrier, confirm)
    return Prepared(carrier, plan, plan.claims.step_s, correction=correction)


def _require_room(problem: Problem, alone: Plan, budget_bytes: int) -> None:
    """Refuse a budget of more than the device has, and warn of one above its headroom."""
    assert alone.device_of is not None
    device = int(alone.device_of[0])
    require_memory(problem.cluster.devices[device], budget_bytes)
    if note := unusable_note(problem, budget_bytes, device):
        warnings.warn(note, BudgetWarning, 7)


def _measured_host(device: torch.device, cluster: Cluster) -> Calibration | None:
    """What this machine's host takes for each op that it asks a GPU for; None without one. Deep
    models of small ops wait for it, the more often the more of them run again."""
    if device.type != "cuda":
        return None
    fit = KindFit(host=measure_host_overhead(device))
    return Calibration({kind.name: fit for kind in cluster.kinds if not kind.is_cpu})


def _told(error: UntraceableError) -> str:
    return f"{error.where}: {error.message}" if error.where else error.message


def _require_arguments(model: nn.Module, batch: Any, recipe: Recipe) -> None:
    """Refuse a batch that the model cannot be called with: nothing will ever be trained so."""
    if recipe.forward is not None:
        return
    try:
        called = inspect.signature(model.forward)
        if isinstance(batch, Mapping):
            called.bind(**batch)
        else:
            called.bind(*(batch if isinstance(batch, tuple | list) else (batch,)))
    except TypeError as error:
        raise UsageError(
            f"{recipe.name} cannot be called with this batch: {error}",
            hint="give a batch as the model takes it, or forward=, which calls the model and "
            "computes the loss",
        ) from None


def _leanest(
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    budget_bytes: int,
    device: torch.device,
    reason: str,
    *,
    async_update: bool,
) -> Budgeted:
    """A model that cannot be recorded: everything streamed and recomputed, nothing rehearsed."""
    section = uniform(
        model, budget_bytes, activations="recomputed", checkpoint="offloaded",
        parameters="streamed", update="host",
    )  # fmt: skip
    section = replace(section, async_update=async_update)
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
) -> Prepared:
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
    carrier = MovedModules(
        model, recipe, graph, saved.plan.device_of, _devices(saved, alone), lost=lost
    )
    return Prepared(carrier, saved.plan, claimed_step_s(saved.problem, saved.plan))


def _warn_of_hooks(model: nn.Module) -> None:
    """Hooks are Python code: what they compute is traced, what else they do happens once."""
    if hooked := hooked_modules(model):
        named = ", ".join(repr(path) for path in hooked[:3]) + (", …" if len(hooked) > 3 else "")
        warnings.warn(
            f"hooks of {named} run when a step is traced and not in every step: tensors that they "
            "compute are part of it, but what they collect or print is not; hint: remove them, or "
            "train with memory=, which calls the model in every step",
            HookWarning,
            5,
        )


class HookWarning(UserWarning):
    """Hooks of a model do not run in every step."""


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
