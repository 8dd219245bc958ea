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
from hocket.planners.memory.frontier import Fitted, Frontier

_MAX_TRIES = 4


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
    peaks: dict[str, int] = {}
    plans: dict[str, Fitted] = {}

    def tried(plan: Fitted) -> int:
        plans[plan.name] = plan
        peaks[plan.name] = rehearse(plan.memory or plain)
        return peaks[plan.name]

    asked = float(budget_bytes)
    for _ in range(_MAX_TRIES):
        chosen = frontier.best(asked) or frontier.smallest
        if chosen.name in peaks:
            break
        asked = chosen.peak_bytes * budget_bytes / tried(chosen)
    if min(peaks.values()) > budget_bytes and frontier.smallest.name not in peaks:
        tried(frontier.smallest)
    if min(peaks.values()) > budget_bytes:
        raise too_large(min(peaks.values()), budget_bytes)
    kept = [plans[name] for name, peak in peaks.items() if peak <= budget_bytes]
    best = min(kept, key=lambda plan: (plan.step_s, peaks[plan.name]))
    return KeptBudget(best.memory or plain, peaks[best.name], best.step_s)


def too_large(peak_bytes: int, budget_bytes: int) -> NoFeasiblePlanError:
    """The error of a step that does not keep its budget."""
    return NoFeasiblePlanError(
        f"the step does not fit into {format_bytes(budget_bytes)}: the leanest plan holds "
        f"{format_bytes(peak_bytes)}",
        hint=f"give it memory={peak_bytes}, or make the batch smaller",
    )
