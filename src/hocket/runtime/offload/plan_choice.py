"""Choice of the fastest memory plan whose dry run stays within a budget.

Simulated peaks are approximate, so only a dry run decides whether a plan fits. Plans that fit
according to the simulator get dry runs in order of their step times, until one fits. Faster plans
whose simulated peak slightly exceeds the budget are tried next. A larger budget therefore never
gives a slower step, and no chosen plan is slower than full recompute if full recompute fits.

A dry run of a deep model takes many seconds. For deep models a plan gets a dry run only if it would
fit at the smallest ratio of dry-run peak to simulated peak found so far. Plans that exceed the
budget and copy nothing are skipped: only copies that end earlier than simulated can make a dry-run
peak smaller. Plans that the model cannot run are skipped, too. If no plan remains, plans without
recompute or without updates on the device are tried. Before a budget is refused, the smallest plan
for each set of activation policies gets a dry run, so that the error names the minimum memory.
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
"""Largest simulated peak, as a multiple of the budget, at which a plan gets a dry run."""
_FAR_OFF = 2
"""Largest expected ratio of a plan's simulated peak to its dry-run peak."""
MANY_OPS = 5000
"""For steps with more ops, plans that are unlikely to fit get no dry run."""
_MAX_ALTERNATIVES = 4
"""Number of plans tried without recompute, and without device updates, if all others failed."""
_BUDGET_SHARES = (1.0, 0.99, 0.95)
"""Fractions of a budget for which plans that save some activations on the device are considered:
dry runs find slightly more memory than the simulator."""


class BudgetPlan(NamedTuple):
    """A memory plan with its peak memory and step time."""

    section: Memory
    peak_bytes: int | None
    """Device memory that the step needs according to its dry run; None without a dry run.

    On a GPU it is the reserved memory and the CUDA context, else the allocated bytes.
    """
    step_s: float | None = None
    """Predicted time of a step, if known."""
    allocated_bytes: int | None = None
    """Peak of allocated bytes in the dry run."""


def fastest_within_budget(
    budget_bytes: int,
    frontier: Frontier,
    dry_run: Callable[[Memory], int],
    overhead_bytes: int = 0,
) -> BudgetPlan:
    """Return the fastest plan of the frontier whose dry run fits into the budget.

    Dry runs add at least ``overhead_bytes`` to the bytes of tensors.
    """
    available = budget_bytes - overhead_bytes
    plans = _candidates(frontier, budget_bytes, available)
    is_deep = frontier.problem.graph.num_ops > MANY_OPS
    peaks: dict[str, int] = {}
    refused: dict[str, RunError] = {}
    least_ratio = 0.0
    """Smallest ratio of dry-run peak to simulated peak so far."""

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
        """True if a plan had no dry run yet and may be faster than the best so far."""
        if plan.name in peaks or plan.name in refused:
            return False
        if best is None:
            return True
        is_hopeless = plan.peak_bytes > available and is_deep and not plan.moved_bytes
        return plan.rank < best.rank and may_fit(plan) and not is_hopeless

    # The candidates are sorted by step time, so the first one that fits is the fastest.
    inside = [plan for plan in plans if plan.peak_bytes <= available]
    best = next((plan for plan in inside if may_fit(plan) and fits(plan)), None)
    # The ratio may be smaller by now, so plans that were skipped may fit after all.
    others = plans if best else sorted(plans, key=lambda plan: plan.peak_bytes > available)
    best = next((plan for plan in others if is_worth_trying(plan) and fits(plan)), best)
    if best is None and refused:
        alternatives = _alternatives(frontier, budget_bytes)
        best = next((plan for plan in alternatives if is_worth_trying(plan) and fits(plan)), None)
    if best is None:
        if not peaks:
            raise next(iter(refused.values()))
        # Plans with larger simulated peaks cannot lower the minimum that the error names.
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
    """Return plans that are the best for some budget and may fit this one, the fastest first.

    The plain step (without a memory section) does not displace other plans, because its traced
    peak may be smaller than the peak of the actual model.
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
    """Return the smallest plan for each set of activation policies, including the plain step.

    If a model checkpoints activations itself, other plans may need more memory than the plain
    step.
    """
    kinds: dict[frozenset[str], Fitted] = {}
    for plan in sorted(frontier.plans, key=lambda plan: plan.peak_bytes):
        blocks = () if plan.memory is None else plan.memory.blocks
        kinds.setdefault(frozenset(block.activations for block in blocks), plan)
    return list(kinds.values())


def too_large(peak_bytes: int, budget_bytes: int) -> NoFeasiblePlanError:
    """Return the error for a step that does not fit its budget."""
    budget, peak = format_apart(budget_bytes, peak_bytes)
    return NoFeasiblePlanError(
        f"the step does not fit into {budget}: the minimum-memory plan needs {peak}",
        hint=f'give it memory="{typed_bytes(peak_bytes)}", or make the batch smaller',
    )
