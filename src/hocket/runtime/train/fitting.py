"""Find the memory plan whose rehearsed peak is within a budget.

A planner is asked for the budget; what it gives is rehearsed, and as long as the rehearsal is over
the budget, it is asked again for less by what was too much. So a planner's model of memory may be
rough, and the budget is kept all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes
from hocket.plan.sections.memory import Memory

_MAX_TRIES = 6


class KeptBudget(NamedTuple):
    """A memory plan and what it was found to hold."""

    section: Memory
    peak_bytes: int
    """The most that the rehearsed steps held."""
    step_s: float | None = None
    """What a step should take, where somebody knows."""


def fitted(
    budget_bytes: int, plan_at: Callable[[int], Memory | None], rehearse: Callable[[Memory], int]
) -> KeptBudget:
    """The first plan within the budget; ``plan_at`` gives None where it knows none."""
    asked, least = budget_bytes, 0
    for _ in range(_MAX_TRIES):
        memory = plan_at(asked)
        if memory is None:
            break
        peak_bytes = rehearse(memory)
        if peak_bytes <= budget_bytes:
            return KeptBudget(memory, peak_bytes)
        least = min(least or peak_bytes, peak_bytes)
        asked -= peak_bytes - budget_bytes
    found = f"; {format_bytes(least)} would do" if least else ""
    raise NoFeasiblePlanError(
        f"no step within {format_bytes(budget_bytes)} was found{found}",
        hint="give more memory, or make the batch smaller",
    )
