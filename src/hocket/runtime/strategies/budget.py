"""Training within a memory budget on one device: by a given memory plan, or the fastest that fits.

Tensors that do not fit are offloaded to the host or recomputed. `budget_strategy` traces the step,
simulates memory plans, checks the best ones by dry runs, and caches the chosen plan. Models that
cannot be traced get the minimum-memory policy without a dry run. Torch offers saved-tensor hooks
and activation checkpointing, but does not choose what to offload or recompute for a budget.
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
from hocket.runtime.offload.budgeted_model import BudgetedModel, BudgetSetup
from hocket.runtime.offload.chunked_loss import supports_chunked_loss
from hocket.runtime.offload.dry_run import DryRuns, dry_runs_of
from hocket.runtime.offload.host_bandwidth import with_measured_host
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.offload.plan_correction import CachedPlan, PlanCorrection
from hocket.runtime.planned_model import require_same
from hocket.runtime.strategies.placed import described, warn_without_loss
from hocket.runtime.strategy import Prepared, TrainingTask, claimed_step_s, is_emulated, predicted_s


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


def _planned_budget(task: TrainingTask, problem: Problem, plan: Plan) -> BudgetedModel:
    """Return the strategy of a plan's memory section; refuses a plan for another step."""
    section = plan[Memory]
    if task.options.async_update and not section.async_update:
        raise UsageError(
            "async_update=True, but the memory plan finishes updates with each step",
            hint="plan with hocket fit --async-update, or leave async_update out",
        )
    dry_runs = dry_runs_of(task)
    require_same(problem.graph, dry_runs.graph, task.recipe.name)
    peak_bytes, budget_bytes = dry_runs.card_bytes(section), section.budget_bytes[0]
    if peak_bytes > budget_bytes:
        least_bytes = min(peak_bytes, _minimum_bytes(dry_runs, problem, section) or peak_bytes)
        held, allowed = format_apart(peak_bytes, budget_bytes)
        raise NoFeasiblePlanError(
            f"the step needs {held} in its dry run, and its plan allows {allowed}",
            # Plans of hocket fit are chosen by the simulator alone, and might need more again.
            hint=f"the minimum-memory plan needs {format_bytes(least_bytes)}; train with "
            f'hocket.prepare(…, memory="{typed_bytes(max(least_bytes, budget_bytes))}"), which '
            "runs plans dry before it takes one",
        )
    step_s = predicted_s(problem, plan, task.device)
    return dry_runs.strategy(BudgetPlan(section, peak_bytes, step_s, dry_runs.peak_bytes(section)))


def _minimum_bytes(dry_runs: DryRuns, problem: Problem, section: Memory) -> int | None:
    """Return the peak of the minimum-memory plan; None if the model cannot run it."""
    alone = on_one_device(problem)
    in_chunks = supports_chunked_loss(dry_runs.task.model, dry_runs.graph)
    smallest = find_frontier(problem, alone, in_chunks=in_chunks).smallest.memory
    blocks = Memory(budget_bytes=(), blocks=()) if smallest is None else smallest
    try:
        return dry_runs.card_bytes(replace(blocks, budget_bytes=section.budget_bytes))
    except RunError:
        return None


def _fastest_within(
    task: TrainingTask, on: str | Path | Cluster, budget_bytes: int, doing: Progress
) -> Prepared:
    """Prepare the fastest memory plan within a budget, from the cache or by a search."""
    device, options = task.device, task.options
    doing.stage("trace the step")
    try:
        dry_runs = dry_runs_of(task)
    except UntraceableError as error:
        _require_arguments(task)
        lean = _least_memory(task, budget_bytes, described(error))
        return Prepared(lean, Plan(planner="memory").having(lean.budget_plan.section), None)
    warn_without_loss(dry_runs.graph, task.recipe.name)
    graph, cluster = dry_runs.graph, find_cluster(on)
    if on != ON_THIS_MACHINE:
        require_one_device(cluster)
    problem = make_problem(graph, cluster)
    # The plain step may hold more than any device has: memory plans are for that.
    alone = on_one_device(problem)
    _require_device_memory(problem, alone, budget_bytes)
    is_update_alone = dry_runs.updates_early and options.accumulate == 1

    @cache
    def frontier() -> Frontier:
        doing.stage("measure this machine")
        rated = with_measured_host(cluster, device) if on == ON_THIS_MACHINE else cluster
        host = _measured_host(device, cluster) if on == ON_THIS_MACHINE else None
        doing.stage(f"simulate memory plans of {graph.num_ops:,} ops")
        is_replayed = not dry_runs.no_replay(None, budget_bytes) and is_update_alone
        timed = make_problem(graph, rated, calibration=host)
        in_chunks = not options.outputs and supports_chunked_loss(task.model, graph)
        return find_frontier(
            timed, on_one_device(timed), in_chunks=in_chunks,
            replayed=launched(make_problem(graph, rated), "replayed") if is_replayed else None,
            async_update=options.async_update,
        )  # fmt: skip

    cached = CachedPlan(dry_runs, problem, budget_bytes)
    recalled = cached.recall()
    if recalled is None:
        plans = frontier()
        doing.stage("run the fastest plans dry")
        found, is_confirmed = dry_runs.fastest_within_budget(budget_bytes, plans), False
        cached.keep(found, is_confirmed=False)
    else:
        found, is_confirmed = recalled
    plan = alone.having(found.section).claiming(step_s=found.step_s)
    # A time predicted for other hardware must not be compared with measured steps.
    if is_emulated(problem, alone, device):
        found = found._replace(step_s=None)
    doing.stage("move parameters to where they are kept")
    strategy = dry_runs.strategy(found)
    correction = None
    is_predicted = found.step_s is not None and is_update_alone
    if device.type == "cuda" and is_predicted and not is_confirmed:
        confirm = partial(cached.keep, is_confirmed=True)
        correction = PlanCorrection(dry_runs, frontier, strategy, confirm)
    return Prepared(strategy, plan, plan.claims.step_s, correction=correction)


def _require_device_memory(problem: Problem, alone: Plan, budget_bytes: int) -> None:
    """Refuse a budget above the device's memory, and warn of one above its headroom."""
    assert alone.device_of is not None
    device = int(alone.device_of[0])
    require_memory(problem.cluster.devices[device], budget_bytes)
    if note := unusable_note(problem, budget_bytes, device):
        warn_user(note, BudgetWarning)


def _measured_host(device: torch.device, cluster: Cluster) -> Calibration | None:
    """Measure the host's time to launch an op on a GPU; None without a GPU.

    Deep models of small ops are bound by launches, and more so the more ops are recomputed.
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


def _least_memory(task: TrainingTask, budget_bytes: int, reason: str) -> BudgetedModel:
    """Stream weights and recompute all activations, without a dry run; for untraceable models."""
    section = uniform(
        task.model, budget_bytes, activations="recomputed", checkpoint="offloaded",
        parameters="streamed", update="host",
    )  # fmt: skip
    section = replace(section, async_update=task.options.async_update)
    lost = (
        f"{task.recipe.name} cannot be traced, because {reason}; everything is streamed and "
        "recomputed, and the budget is not verified before training"
    )
    warn_user(lost, CaptureWarning)
    setup = BudgetSetup(lost=lost, outputs=task.options.outputs)
    plan = BudgetPlan(section, None)
    return BudgetedModel(task.model, task.batch, task.recipe, plan, task.device, setup)
