"""Planners for tight memory: mend a given placement, or split the model anew.

Both try what changes least first: another order, a few moves, then a search that gives up the order
in which devices run freely. The best plan that was seen is returned, so the overflow never grows.
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.memory.attempt import Attempt, attempt
from hocket.planners.placement.memory.mend import levels_of, moved, reordered, searched
from hocket.planners.placement.memory.split import split_attempts

MAX_OPS_TO_MEND = 100_000
"""Of all splits that are mended together; one always is."""


def spread_memory(problem: Problem, plan: Plan) -> Plan:
    """A plan near the given one that fits, or the one that lacks least of all that were tried."""
    best = attempt(problem, plan)
    if best.overflow_bytes:
        best = reordered(problem, best)
    if not best.overflow_bytes or problem.contiguous:
        return best.plan
    best = moved(problem, best, levels_of(problem))
    if best.overflow_bytes:
        best = min(best, _split(problem, plan), key=Attempt.rank)
    return best.plan


def memory_split(problem: Problem, plan: Plan) -> Plan:
    """Contiguous blocks that fit, or the plan that lacks least of all that were tried."""
    if problem.contiguous:
        return split_attempts(problem, plan)[0].plan
    best = _split(problem, plan)
    if best.overflow_bytes:
        best = min(best, searched(problem, best, levels_of(problem)), key=Attempt.rank)
    if best.plan.by_device is not None:
        best = min(
            best, attempt(problem, best.plan.ordered(priority=best.plan.priority)), key=Attempt.rank
        )
    return best.plan


def _split(problem: Problem, plan: Plan) -> Attempt:
    """The model split anew, and mended where no split fits by itself."""
    starts = split_attempts(problem, plan)
    best = starts[0]
    if not best.overflow_bytes:
        return best
    levels = levels_of(problem)
    num_mended = max(1, MAX_OPS_TO_MEND // max(problem.graph.num_ops, 1))
    for start in starts[:num_mended]:
        best = min(best, moved(problem, start, levels), key=Attempt.rank)
        if not best.overflow_bytes:
            break
    return best
