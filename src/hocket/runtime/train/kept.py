"""A model under a memory plan that is there already: rehearsed, refused where it holds more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hocket.base.errors import NoFeasiblePlanError, RunError, UsageError
from hocket.base.units import format_apart, format_bytes, typed_bytes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.placement.one_device import on_one_device
from hocket.runtime.memory.logits import can_be_in_chunks
from hocket.runtime.rebuild import require_same
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.loop import LoopOptions
from hocket.runtime.train.predicted import predicted_s
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsed import Rehearsals, rehearsals_of


def planned_budget_carrier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    problem: Problem,
    plan: Plan,
    device: torch.device,
    options: LoopOptions,
) -> Budgeted:
    """What carries out on a device the memory section of a plan for this very step."""
    section = plan[Memory]
    if options.async_update and not section.async_update:
        raise UsageError(
            "async_update=True, but the memory plan finishes updates with each step",
            hint="plan with hocket fit --async-update, or leave async_update out",
        )
    rehearsals = rehearsals_of(model, optimizer, batch, recipe, device, options)
    require_same(problem.graph, rehearsals.graph, recipe.name)
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
    step_s, allocated_bytes = predicted_s(problem, plan, device), rehearsals.peak_bytes(section)
    return rehearsals.carrier(KeptBudget(section, peak_bytes, step_s, allocated_bytes))


def _leanest_bytes(rehearsals: Rehearsals, problem: Problem, section: Memory) -> int | None:
    """What the leanest plan of this step holds when it is rehearsed; None where the model cannot be
    carried out by it."""
    alone = on_one_device(problem)
    in_chunks = can_be_in_chunks(rehearsals.model, rehearsals.graph)
    leanest = find_frontier(problem, alone, in_chunks=in_chunks).smallest.memory
    blocks = Memory(budget_bytes=(), blocks=()) if leanest is None else leanest
    try:
        return rehearsals.card_bytes(replace(blocks, budget_bytes=section.budget_bytes))
    except RunError:
        return None
