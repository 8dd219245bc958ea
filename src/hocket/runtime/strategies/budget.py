"""Training within a memory budget on one device: a plan's memory section, or the fastest that fits.

What does not fit is offloaded to the host or recomputed. Plans are run dry before one is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from hocket.base.errors import NoFeasiblePlanError, RunError, UsageError
from hocket.base.progress import Progress, progress
from hocket.base.units import format_apart, format_bytes, typed_bytes
from hocket.base.warn import warn_user
from hocket.capture.model import CaptureWarning
from hocket.capture.trouble import UntraceableError
from hocket.cost.calibrate import Calibration
from hocket.cost.dispatch import measure_host_overhead
from hocket.cost.efficiency import KindFit
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan
from hocket.plan.make import ON_THIS_MACHINE, find_cluster, launched, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory
from hocket.planners.memory.frontier import Frontier, find_frontier
from hocket.planners.memory.given_budget import (
    BudgetWarning,
    budget_of,
    require_memory,
    require_one_device,
    unusable_note,
)
from hocket.planners.placement.baselines import on_one_device
from hocket.runtime.offload.allocator import expand_segments
from hocket.runtime.offload.budgeted_model import Budgeted
from hocket.runtime.offload.chunked_loss import can_be_in_chunks
from hocket.runtime.offload.dry_run import Rehearsals, rehearsals_of
from hocket.runtime.offload.host_bandwidth import rated_here
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.offload.plan_cache import known_plan
from hocket.runtime.offload.plan_choice import KeptBudget
from hocket.runtime.offload.plan_correction import PlanCorrection
from hocket.runtime.rebuild import require_same
from hocket.runtime.strategies.placed import described, warn_without_loss
from hocket.runtime.task import Prepared, TrainingTask
from hocket.runtime.train.predicted_step import are_played, claimed_step_s, predicted_s


def budget_strategy(
    task: TrainingTask,
    saved: SavedPlan | None,
    on: str | Path | Cluster,
    memory: int | str | None,
) -> Prepared:
    """Prepare the model within a budget: the plan's memory section, or what fits ``memory``."""
    device = task.device
    if reason := expand_segments(device):
        warn_user(
            "allocated bytes keep the budget, but reserved memory may exceed it, because PyTorch's "
            f"allocator has no expandable segments: {reason}; set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch "
            "2.10) before the program starts",
            BudgetWarning,
        )
    if saved is not None:
        kept = _planned_budget(task, saved.problem, saved.plan)
        return Prepared(kept, saved.plan, claimed_step_s(saved.problem, saved.plan))
    assert memory is not None, "a budget is given, or a plan that has one"
    with progress(f"hocket: {task.recipe.name} within {format_bytes(budget_of(memory))}") as doing:
        return _fastest_within(task, on, budget_of(memory), doing)


def _planned_budget(task: TrainingTask, problem: Problem, plan: Plan) -> Budgeted:
    """Execute the memory section of a plan for this very step."""
    section = plan[Memory]
    if task.options.async_update and not section.async_update:
        raise UsageError(
            "async_update=True, but the memory plan finishes updates with each step",
            hint="plan with hocket fit --async-update, or leave async_update out",
        )
    rehearsals = _dry_runs(task)
    require_same(problem.graph, rehearsals.graph, task.recipe.name)
    peak_bytes, budget_bytes = rehearsals.card_bytes(section), section.budget_bytes[0]
    if peak_bytes > budget_bytes:
        leanest_bytes = min(peak_bytes, _leanest_bytes(rehearsals, problem, section) or peak_bytes)
        held, allowed = format_apart(peak_bytes, budget_bytes)
        raise NoFeasiblePlanError(
            f"the step holds {held} when it is rehearsed, and its plan allows {allowed}",
            # Plans of hocket fit are chosen by what the simulator sees, and might hold more again.
            hint=f"the leanest plan holds {format_bytes(leanest_bytes)}; train with hocket.prepare("
            f'…, memory="{typed_bytes(max(leanest_bytes, budget_bytes))}"), which rehearses plans '
            "before it takes one",
        )
    step_s, allocated_bytes = (
        predicted_s(problem, plan, task.device),
        rehearsals.peak_bytes(section),
    )
    return rehearsals.strategy(KeptBudget(section, peak_bytes, step_s, allocated_bytes))


def _leanest_bytes(rehearsals: Rehearsals, problem: Problem, section: Memory) -> int | None:
    """Peak of the minimum-memory plan in a dry run; None where the model cannot follow it."""
    alone = on_one_device(problem)
    in_chunks = can_be_in_chunks(rehearsals.model, rehearsals.graph)
    leanest = find_frontier(problem, alone, in_chunks=in_chunks).smallest.memory
    blocks = Memory(budget_bytes=(), blocks=()) if leanest is None else leanest
    try:
        return rehearsals.card_bytes(replace(blocks, budget_bytes=section.budget_bytes))
    except RunError:
        return None


def _dry_runs(task: TrainingTask) -> Rehearsals:
    return rehearsals_of(
        task.model, task.optimizer, task.batch, task.recipe, task.device, task.options
    )


def _fastest_within(
    task: TrainingTask, on: str | Path | Cluster, budget_bytes: int, doing: Progress
) -> Prepared:
    """Prepare the fastest memory plan that keeps a budget, known from before or found now."""
    device, options = task.device, task.options
    doing.stage("trace the step")
    try:
        rehearsals = _dry_runs(task)
    except UntraceableError as error:
        _require_arguments(task)
        lean = _least_memory(task, budget_bytes, described(error))
        return Prepared(lean, Plan(planner="memory").having(lean.kept.section), None)
    warn_without_loss(rehearsals.graph, task.recipe.name)
    graph, cluster = rehearsals.graph, find_cluster(on)
    if on != ON_THIS_MACHINE:
        require_one_device(cluster)
    problem = make_problem(graph, cluster)
    # The plain step may hold more than any device has: memory plans are for that.
    alone = on_one_device(problem)
    _require_room(problem, alone, budget_bytes)
    is_update_alone = rehearsals.updates_early and options.accumulate == 1

    @cache
    def frontier() -> Frontier:
        doing.stage("measure this machine")
        rated = rated_here(cluster, device) if on == ON_THIS_MACHINE else cluster
        host = _measured_host(device, cluster) if on == ON_THIS_MACHINE else None
        doing.stage(f"simulate memory plans of {graph.num_ops:,} ops")
        is_replayed = not rehearsals.launches(budget_bytes).refusal and is_update_alone
        timed = make_problem(graph, rated, calibration=host)
        in_chunks = not options.outputs and can_be_in_chunks(task.model, graph)
        return find_frontier(
            timed, on_one_device(timed), in_chunks=in_chunks,
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
    strategy = rehearsals.strategy(found)
    correction = None
    is_predicted = found.step_s is not None and is_update_alone
    if device.type == "cuda" and is_predicted and not is_confirmed:
        confirm = partial(known.keep, is_confirmed=True)
        correction = PlanCorrection(rehearsals, frontier, strategy, confirm)
    return Prepared(strategy, plan, plan.claims.step_s, correction=correction)


def _require_room(problem: Problem, alone: Plan, budget_bytes: int) -> None:
    """Refuse a budget of more than the device has, and warn of one above its headroom."""
    assert alone.device_of is not None
    device = int(alone.device_of[0])
    require_memory(problem.cluster.devices[device], budget_bytes)
    if note := unusable_note(problem, budget_bytes, device):
        warn_user(note, BudgetWarning)


def _measured_host(device: torch.device, cluster: Cluster) -> Calibration | None:
    """Measure what the host takes to launch an op on a GPU; None without one.

    Deep models of small ops wait for the host, the more often the more of them are recomputed.
    """
    if device.type != "cuda":
        return None
    fit = KindFit(host=measure_host_overhead(device))
    return Calibration({kind.name: fit for kind in cluster.kinds if not kind.is_cpu})


def _require_arguments(task: TrainingTask) -> None:
    """Refuse a batch that the model cannot be called with."""
    model, batch, recipe = task.model, task.batch, task.recipe
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


def _least_memory(task: TrainingTask, budget_bytes: int, reason: str) -> Budgeted:
    """Stream and recompute everything: for a model that cannot be traced, without a dry run."""
    section = uniform(
        task.model, budget_bytes, activations="recomputed", checkpoint="offloaded",
        parameters="streamed", update="host",
    )  # fmt: skip
    section = replace(section, async_update=task.options.async_update)
    lost = (
        f"{task.recipe.name} cannot be rehearsed, because {reason}; all is streamed and "
        "recomputed, and whether that keeps the budget shows only when it runs"
    )
    warn_user(lost, CaptureWarning)
    kept = KeptBudget(section, None)
    return Budgeted(
        task.model, task.batch, task.recipe, kept, task.device, lost=lost,
        outputs=task.options.outputs,
    )  # fmt: skip
