"""Find the fastest memory plan whose rehearsed peak is within a budget.

A planner's model of memory may be rough. So what it gives for a budget is rehearsed, and it is
asked again for as much more or less as the rehearsal was beside its prediction, until it gives what
was seen already. Of the plans that keep the budget the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.frontier import Frontier

_MAX_TRIES = 4


class KeptBudget(NamedTuple):
    """A memory plan and what it was found to hold."""

    section: Memory
    peak_bytes: int
    """The most that the rehearsed steps held."""
    step_s: float | None = None
    """What a step should take, where somebody knows."""


def fitted(budget_bytes: int, frontier: Frontier, rehearse: Callable[[Memory], int]) -> KeptBudget:
    """The fastest of the frontier's plans that keeps the budget when it is rehearsed."""
    plain = Memory(budget_bytes=(budget_bytes,), blocks=())
    tried: dict[str, KeptBudget] = {}
    asked = float(budget_bytes)
    for _ in range(_MAX_TRIES):
        chosen = frontier.best(asked) or frontier.smallest
        if chosen.name in tried:
            break
        section = chosen.memory if chosen.memory is not None else plain
        peak_bytes = rehearse(section)
        tried[chosen.name] = KeptBudget(section, peak_bytes, chosen.step_s)
        asked = chosen.peak_bytes * budget_bytes / peak_bytes
    kept = [each for each in tried.values() if each.peak_bytes <= budget_bytes]
    if not kept and frontier.smallest.name not in tried:
        leanest = frontier.smallest
        section = leanest.memory if leanest.memory is not None else plain
        last = KeptBudget(section, rehearse(section), leanest.step_s)
        tried[leanest.name] = last
        kept = [last] if last.peak_bytes <= budget_bytes else []
    if not kept:
        least = min(each.peak_bytes for each in tried.values())
        raise NoFeasiblePlanError(
            f"the step does not fit into {format_bytes(budget_bytes)}: the leanest plan holds "
            f"{format_bytes(least)}",
            hint=f"give it memory={least}, or make the batch smaller",
        )
    return min(kept, key=lambda each: (each.step_s or 0.0, each.peak_bytes))
