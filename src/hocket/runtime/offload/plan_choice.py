"""Choice of the fastest memory plan whose dry run stays within a budget.

The simulator's peaks may be rough, so a plan counts by its dry run. Plans that fit in the simulator
are run dry from the fastest on until one fits; then those that are even faster and exceed the
budget by little in the simulator. So a larger budget never gives a slower step, and no plan is
slower than full recompute where that fits.

A dry run of a deep model takes many seconds. Of such a model only those plans are run dry that
would fit if their dry run exceeded the simulator by as little as the best one so far; plans beyond
the budget that move nothing are left out, because only copies that end early can make them smaller.
A plan that the model cannot follow is skipped; where all are, plans without recompute or without
updates on the device are tried. Before a budget is refused, the smallest plan of each kind is run
dry, so that the refusal names the least memory that is needed.
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
"""Plans up to this many budgets in the simulator get a dry run."""
_FAR_OFF = 2
"""No plan is expected to need less than its simulated peak over this."""
MANY_OPS = 5000
"""Ops of a step from which on dry runs are rationed."""
_MAX_ALTERNATIVES = 4
"""Plans of a kind that are tried where all others were refused: a dry run takes seconds."""
_BUDGET_SHARES = (1.0, 0.99, 0.95)
"""Shares of a budget for which plans that keep some blocks are considered: dry runs find a little
more than the simulator."""


class BudgetPlan(NamedTuple):
    """A memory plan and its peak."""

    section: Memory
    peak_bytes: int | None
    """Memory that a card must have for the step, by its dry run: on a GPU reserved memory and the
    CUDA context, else allocated bytes; None without a dry run."""
    step_s: float | None = None
    """Predicted time of a step, where it is known."""
    allocated_bytes: int | None = None
    """Peak of allocated bytes in the dry run."""


def fastest_within_budget(
    budget_bytes: int,
    frontier: Frontier,
    dry_run: Callable[[Memory], int],
    overhead_bytes: int = 0,
) -> BudgetPlan:
    """Return the fastest of the frontier's plans whose dry run fits; dry runs add at least
    ``overhead_bytes`` to the bytes of tensors."""
    available = budget_bytes - overhead_bytes
    plans = _candidates(frontier, budget_bytes, available)
    is_deep = frontier.problem.graph.num_ops > MANY_OPS
    peaks: dict[str, int] = {}
    refused: dict[str, RunError] = {}
    least_ratio = 0.0
    """Smallest ratio of dry run to simulated peak so far."""

    def fits(plan: Fitted) -> bool:
        nonlocal least_ratio
        try:
            peak = dry_run(_section(plan, budget_bytes))
        except RunError as error:
            refused[plan.name] = error
            return False
        peaks[plan.name] = peak
        least_ratio = min(least_ratio or float("inf"), peak / plan.peak_bytes)
        return peak <= budget_bytes

    def may_fit(plan: Fitted) -> bool:
        return not is_deep or least_ratio * plan.peak_bytes <= budget_bytes

    def is_worth_trying(plan: Fitted) -> bool:
        """True if a plan without a dry run may be faster than the best so far."""
        if plan.name in peaks or plan.name in refused:
            return False
        if best is None:
            return True
        is_hopeless = plan.peak_bytes > available and is_deep and not plan.moved_bytes
        return plan.rank < best.rank and may_fit(plan) and not is_hopeless

    inside = [plan for plan in plans if plan.peak_bytes <= available]
    best = next((plan for plan in inside if may_fit(plan) and fits(plan)), None)
    # The ratio is better known by now: plans that were skipped may fit after all.
    others = plans if best else sorted(plans, key=lambda plan: plan.peak_bytes > available)
    best = next((plan for plan in others if is_worth_trying(plan) and fits(plan)), best)
    if best is None and refused:
        alternatives = _alternatives(frontier, budget_bytes)
        best = next((plan for plan in alternatives if is_worth_trying(plan) and fits(plan)), None)
    if best is None:
        if not peaks:
            raise next(iter(refused.values()))
        nearest = min(peaks.values()) * (1 if is_deep else _FAR_OFF)
        kinds = [plan for plan in _smallest_of_kinds(frontier) if plan.peak_bytes < nearest]
        best = next((plan for plan in kinds if is_worth_trying(plan) and fits(plan)), None)
    if best is None:
        raise too_large(min(peaks.values()), budget_bytes)
    return BudgetPlan(_section(best, budget_bytes), peaks[best.name], best.step_s)


def _section(plan: Fitted, budget_bytes: int) -> Memory:
    if plan.memory is None:
        return Memory(budget_bytes=(budget_bytes,), blocks=())
    return replace(plan.memory, budget_bytes=(budget_bytes,))


def _candidates(frontier: Frontier, budget_bytes: int, available: int) -> list[Fitted]:
    """Return plans that are best for some budget and may fit this one, the fastest first.

    The plain step excludes none of them: a traced one holds less than the model itself.
    """
    others = replace(frontier, plans=tuple(p for p in frontier.plans if p.memory is not None))
    plans = {plan.name: plan for plan in (*frontier.best_of(), *others.best_of())}
    for share in _BUDGET_SHARES:
        for keeping in frontier.keeping:
            if (plan := keeping.best(share * available)) is not None:
                plans[plan.name] = plan
    if (full := frontier.find(FULL_RECOMPUTE)) is not None:
        plans[full.name] = full
    near = {name: p for name, p in plans.items() if p.peak_bytes <= _SLACK * budget_bytes}
    # Nothing is refused before the smallest plan had its dry run.
    near[others.smallest.name] = others.smallest
    return sorted(near.values(), key=lambda plan: plan.rank)


def _alternatives(frontier: Frontier, budget_bytes: int) -> list[Fitted]:
    """Return plans without recompute or without updates on the device, the fastest first."""
    found: list[Fitted] = []
    for field, value in (("update", "device"), ("activations", "recomputed")):
        without = [
            plan
            for plan in frontier.plans
            if plan.memory is not None
            and all(getattr(block, field) != value for block in plan.memory.blocks)
        ]
        near = [plan for plan in without if plan.peak_bytes <= _SLACK * budget_bytes]
        smallest = sorted(without, key=lambda plan: plan.peak_bytes)[:1]
        found += sorted(near, key=lambda plan: plan.rank)[:_MAX_ALTERNATIVES] + smallest
    return sorted({plan.name: plan for plan in found}.values(), key=lambda plan: plan.rank)


def _smallest_of_kinds(frontier: Frontier) -> list[Fitted]:
    """Return the smallest plan of each treatment of activations, the plain step among them: where a
    model checkpoints by itself, others may hold more than it."""
    kinds: dict[frozenset[str], Fitted] = {}
    for plan in sorted(frontier.plans, key=lambda plan: plan.peak_bytes):
        blocks = () if plan.memory is None else plan.memory.blocks
        kinds.setdefault(frozenset(block.activations for block in blocks), plan)
    return list(kinds.values())


def too_large(peak_bytes: int, budget_bytes: int) -> NoFeasiblePlanError:
    """Return the error of a step that does not fit its budget."""
    budget, peak = format_apart(budget_bytes, peak_bytes)
    return NoFeasiblePlanError(
        f"the step does not fit into {budget}: the minimum-memory plan needs {peak}",
        hint=f'give it memory="{typed_bytes(peak_bytes)}", or make the batch smaller',
    )
