"""Find the fastest memory plan whose rehearsed peak is within a budget.

A planner's model of memory may be rough, so a plan counts by what it holds when it is rehearsed.
Plans that keep the budget in the simulator are rehearsed from the fastest on until one keeps it;
then those that are faster still and exceed it by little there. So a larger budget never gives a
longer step, and no plan is slower than full recompute where that keeps the budget. A rehearsal of a
deep model takes many seconds: of such a model only those are rehearsed that keep the budget if what
they hold is beside what was simulated as that of the others was, those passed over once more by
what was found, and of those beyond the budget none that moves nothing, because no copy of it ends
earlier than simulated. A plan that the model cannot be carried out by, as its rehearsal tells, is
passed over; where all are, some are tried that compute nothing again or update nothing on the
device. Before a budget is refused, the leanest plan of each kind is rehearsed (of a deep model one
that seems leaner than what was found), so that what is told is the least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from hocket.base.errors import NoFeasiblePlanError, RunError
from hocket.base.units import format_apart, typed_bytes
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.frontier import Frontier
from hocket.planners.memory.maker import FULL_RECOMPUTE

_SLACK = 1.25
"""A plan is rehearsed where the simulated peak is within this many budgets."""
_FAR_OFF = 2
"""Times what the leanest plan held: from there on no plan is taken to be leaner than simulated."""
MANY_OPS = 5000
"""Of a step, from which on rehearsals are few."""
_MOST_UNLIKE = 4
"""Plans of a kind that are tried where all others were refused: a rehearsal takes seconds."""
_PARTS_OF_ROOM = (1.0, 0.99, 0.95)
"""Of a budget, for which plans that keep some blocks are looked at: rehearsals find a little more
than the simulator."""


class KeptBudget(NamedTuple):
    """A memory plan and what it was found to hold."""

    section: Memory
    peak_bytes: int | None
    """What a card must have for the step, by its dry run: on a GPU reserved memory and the CUDA
    context, else allocated bytes; None without a dry run."""
    step_s: float | None = None
    """Predicted time of a step, where it is known."""
    allocated_bytes: int | None = None
    """The most that tensors of the dry run held at once."""


def fastest_that_keeps(
    budget_bytes: int,
    frontier: Frontier,
    rehearse: Callable[[Memory], int],
    beside_bytes: int = 0,
) -> KeptBudget:
    """The fastest of the frontier's plans that keeps the budget when it is rehearsed; rehearsals
    add at least ``beside_bytes`` to what tensors take."""
    room = budget_bytes - beside_bytes
    plans = _worth_a_rehearsal(frontier, budget_bytes, room)
    is_deep = frontier.problem.graph.num_ops > MANY_OPS
    peaks: dict[str, int] = {}
    refused: dict[str, RunError] = {}
    least = 0.0
    """Rehearsed bytes over simulated ones, of the plan that was the least beyond."""

    def keeps(plan: Fitted) -> bool:
        nonlocal least
        try:
            peak = rehearse(_section(plan, budget_bytes))
        except RunError as error:
            refused[plan.name] = error
            return False
        peaks[plan.name] = peak
        least = min(least or float("inf"), peak / plan.peak_bytes)
        return peak <= budget_bytes

    def may_keep(plan: Fitted) -> bool:
        return not is_deep or least * plan.peak_bytes <= budget_bytes

    def is_worth(plan: Fitted) -> bool:
        """True if a plan that has not been rehearsed may be faster than what was found."""
        if plan.name in peaks or plan.name in refused:
            return False
        if found is None:
            return True
        is_late = plan.peak_bytes > room and is_deep and not plan.moved_bytes
        return plan.rank < found.rank and may_keep(plan) and not is_late

    inside = [plan for plan in plans if plan.peak_bytes <= room]
    found = next((plan for plan in inside if may_keep(plan) and keeps(plan)), None)
    # What was found may have told that plans which were passed over hold less than it seemed.
    others = plans if found else sorted(plans, key=lambda plan: plan.peak_bytes > room)
    found = next((plan for plan in others if is_worth(plan) and keeps(plan)), found)
    if found is None and refused:
        unlike = _unlike(frontier, budget_bytes)
        found = next((plan for plan in unlike if is_worth(plan) and keeps(plan)), None)
    if found is None:
        if not peaks:
            raise next(iter(refused.values()))
        nearest = min(peaks.values()) * (1 if is_deep else _FAR_OFF)
        kinds = [plan for plan in _leanest_of_kinds(frontier) if plan.peak_bytes < nearest]
        found = next((plan for plan in kinds if is_worth(plan) and keeps(plan)), None)
    if found is None:
        raise too_large(min(peaks.values()), budget_bytes)
    return KeptBudget(_section(found, budget_bytes), peaks[found.name], found.step_s)


def _section(plan: Fitted, budget_bytes: int) -> Memory:
    if plan.memory is None:
        return Memory(budget_bytes=(budget_bytes,), blocks=())
    return replace(plan.memory, budget_bytes=(budget_bytes,))


def _worth_a_rehearsal(frontier: Frontier, budget_bytes: int, room: int) -> list[Fitted]:
    """Plans that are best for some budget and may keep this one, the fastest first; none is left
    out for what the simulator sees of the plain step, which as a recorded one holds less than the
    model itself."""
    others = replace(frontier, plans=tuple(p for p in frontier.plans if p.memory is not None))
    plans = {plan.name: plan for plan in (*frontier.best_of(), *others.best_of())}
    for part in _PARTS_OF_ROOM:
        for keeping in frontier.keeping:
            if (kept := keeping.best(part * room)) is not None:
                plans[kept.name] = kept
    if (full := frontier.find(FULL_RECOMPUTE)) is not None:
        plans[full.name] = full
    near = {name: p for name, p in plans.items() if p.peak_bytes <= _SLACK * budget_bytes}
    # Nothing is too large before the leanest plan was rehearsed.
    near[others.smallest.name] = others.smallest
    return sorted(near.values(), key=lambda plan: plan.rank)


def _unlike(frontier: Frontier, budget_bytes: int) -> list[Fitted]:
    """Plans that ask for less of a model, the fastest first, and the leanest of them."""
    found: list[Fitted] = []
    for field, value in (("update", "device"), ("activations", "recomputed")):
        without = [
            plan
            for plan in frontier.plans
            if plan.memory is not None
            and all(getattr(block, field) != value for block in plan.memory.blocks)
        ]
        near = [plan for plan in without if plan.peak_bytes <= _SLACK * budget_bytes]
        leanest = sorted(without, key=lambda plan: plan.peak_bytes)[:1]
        found += sorted(near, key=lambda plan: plan.rank)[:_MOST_UNLIKE] + leanest
    return sorted({plan.name: plan for plan in found}.values(), key=lambda plan: plan.rank)


def _leanest_of_kinds(frontier: Frontier) -> list[Fitted]:
    """Of the plans that treat activations in the same ways the leanest, the plain step among them:
    where a model makes activations again by itself, others may hold more than it."""
    kinds: dict[frozenset[str], Fitted] = {}
    for plan in sorted(frontier.plans, key=lambda plan: plan.peak_bytes):
        blocks = () if plan.memory is None else plan.memory.blocks
        kinds.setdefault(frozenset(block.activations for block in blocks), plan)
    return list(kinds.values())


def too_large(peak_bytes: int, budget_bytes: int) -> NoFeasiblePlanError:
    """The error of a step that does not keep its budget."""
    budget, peak = format_apart(budget_bytes, peak_bytes)
    return NoFeasiblePlanError(
        f"the step does not fit into {budget}: the leanest plan holds {peak}",
        hint=f'give it memory="{typed_bytes(peak_bytes)}", or make the batch smaller',
    )
