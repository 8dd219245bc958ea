"""A model under a memory plan that is there already: rehearsed, refused where it holds more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes, typed_bytes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import Memory
from hocket.runtime.memory.rounding import rounded_parameters
from hocket.runtime.rebuild import require_same
from hocket.runtime.train.budget_launches import budget_launches
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.loop import LoopOptions
from hocket.runtime.train.predicted import predicted_s
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsal import rehearsed_peak


def keeping(
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
    graph, program = recipe.trace(model, batch, "train", is_run=False)
    require_same(problem.graph, graph, recipe.name)
    rounded = rounded_parameters(program)
    budget_bytes = section.budget_bytes[0]
    launches = budget_launches(graph, program, batch, device, budget_bytes, replay=options.replay)
    peak_bytes = launches.beside_bytes(section) + rehearsed_peak(
        model, optimizer, batch, recipe, section, device, graph=graph, rounded=rounded,
        clips=options.clip_norm is not None, accumulate=options.accumulate,
    ).num_bytes  # fmt: skip
    if peak_bytes > budget_bytes:
        scaled = typed_bytes(budget_bytes * budget_bytes // peak_bytes)
        raise NoFeasiblePlanError(
            f"the step holds {format_bytes(peak_bytes)} when it is rehearsed, and its plan allows "
            f"{format_bytes(budget_bytes)}",
            hint=f"plan with --memory {scaled}, or have hocket.prepare(memory=…) choose among "
            "plans that it rehearses",
        )
    kept = KeptBudget(section, peak_bytes, predicted_s(problem, plan, device))
    return Budgeted(
        model, batch, recipe, kept, device, graph=graph, rounded=rounded,
        called=launches.refusal_of(section),
    )  # fmt: skip
