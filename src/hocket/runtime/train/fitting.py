"""Find the fastest memory plan whose rehearsed peak is within a budget.

A planner's model of memory may be rough, so a plan counts by what it holds when it is rehearsed.
Plans are rehearsed from the fastest on until one keeps the budget. Which plans are looked at
depends on the budget only in that a larger one lets more of them in; so a larger budget never gives
a longer step, and no plan is slower than full recompute where that keeps the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes, typed_bytes
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.frontier import Frontier
from hocket.planners.memory.maker import FULL_RECOMPUTE, Fitted

_SLACK = 1.25
"""A plan is rehearsed where the simulated peak is within this many budgets."""


class KeptBudget(NamedTuple):
    """A memory plan and what it was found to hold."""

    section: Memory
    peak_bytes: int | None
    """The most that the rehearsed step held; None where it could not be rehearsed."""
    step_s: float | None = None
    """What a step should take, where somebody knows."""


def fitted(budget_bytes: int, frontier: Frontier, rehearse: Callable[[Memory], int]) -> KeptBudget:
    """The fastest of the frontier's plans that keeps the budget when it is rehearsed."""
    plain = Memory(budget_bytes=(budget_bytes,), blocks=())
    peaks: list[int] = []
    for plan in _worth_a_rehearsal(frontier, budget_bytes):
        section = (
            plain if plan.memory is None else replace(plan.memory, budget_bytes=(budget_bytes,))
        )
        peaks.append(rehearse(section))
        if peaks[-1] <= budget_bytes:
            return KeptBudget(section, peaks[-1], plan.step_s)
    raise too_large(min(peaks), budget_bytes)


def _worth_a_rehearsal(frontier: Frontier, budget_bytes: int) -> list[Fitted]:
    """Plans that are best for some budget and may keep this one, the fastest first."""
    plans = {plan.name: plan for plan in frontier.best_of()}
    if (full := frontier.find(FULL_RECOMPUTE)) is not None:
        plans[full.name] = full
    near = [plan for plan in plans.values() if plan.peak_bytes <= _SLACK * budget_bytes]
    return sorted(near, key=lambda plan: plan.rank) or [frontier.smallest]


def too_large(peak_bytes: int, budget_bytes: int) -> NoFeasiblePlanError:
    """The error of a step that does not keep its budget."""
    return NoFeasiblePlanError(
        f"the step does not fit into {format_bytes(budget_bytes)}: the leanest plan holds "
        f"{format_bytes(peak_bytes)}",
        hint=f'give it memory="{typed_bytes(peak_bytes)}", or make the batch smaller',
    )
