"""Orders in which each device runs its ops, for a given placement.

The same placement can take twice as long in another order, and no rule for the order is the best
everywhere, so several are tried on each plan: topological, by bottom level, by earliest start, and
refined on the critical path. Ops that draw random numbers are seeded one by one when they run, so
any order gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hocket.base.arrays import FloatArray, positions
from hocket.base.errors import unknown_name
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Order
from hocket.planners.order.levels import latest_starts, levels, placement_of
from hocket.planners.shared import is_large
from hocket.simulate.evaluate import Evaluator

# Bottom level: of the ready ops a device runs the one with the longest path to the end.
#
# The classical priority of list scheduling (Hu 1961; upward rank in HEFT, Topcuoglu et al. 2002).
# Paths include the transfers that this placement causes, no others. O(ops + reads).


def bottom_level(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with priorities by bottom level."""
    to_end_s = levels(problem, placement_of(plan)).to_end_s
    return plan.ordered(priority=-to_end_s)


# Topological order: each device runs the ready op that is first in the graph.
#
# For captured graphs that is the order in which the program itself would run. O(1).


def topological(problem: Problem, plan: Plan) -> Plan:
    """Return the plan without an order or priorities of its own."""
    # Raises an error if the plan has no placement.
    placement_of(plan)
    return plan.ordered()


# Earliest start: ops run in the order in which they could start if devices were never busy.
#
# Keeps independent branches level with each other where the bottom level would finish the longest
# first; of ops that could start together the one with the longest path to the end comes first.
# O(ops log ops + reads).


def earliest_start(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with priorities by earliest start."""
    found = levels(problem, placement_of(plan))
    sequence = np.lexsort((-found.to_end_s, found.from_start_s))
    return plan.ordered(priority=positions(sequence).astype(np.float64))


# Critical-path refinement: simulate, prioritise the ops that delayed the step, repeat.
#
# Every round turns what the simulation showed into priorities. The first rounds use latest starts
# under the simulated transfer times, waiting for links included. The others start from the best
# order so far and run the ops on its critical path earlier, by as long as they waited for their
# devices. A round counts if the step gets shorter. After the scheduler-emulating refinement of
# ParDNN (Qararyah et al., 2021), applied to the order. O(rounds · simulation).

_ROUNDS = 4
_FEW_ROUNDS = 2
"""Rounds for large graphs, whose simulation takes long."""
_NO_SLACK = 1e-9
"""Fraction of the step below which slack counts as rounding."""


def critical_refined(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with priorities that were refined on its critical paths."""
    return refined(Evaluator(problem), problem, plan)


def refined(evaluator: Evaluator, problem: Problem, plan: Plan) -> Plan:
    """Refine priorities on the critical paths, with an existing evaluator of the problem."""
    device_of, is_short = placement_of(plan), is_large(problem.graph.num_ops)
    priority = -levels(problem, device_of).to_end_s
    best = evaluator(device_of, priority), priority
    for _ in range(_FEW_ROUNDS if is_short else _ROUNDS):
        priority = latest_starts(evaluator, keeps_order=False)
        score = evaluator(device_of, priority)
        if score < best[0]:
            best = score, priority
        elif is_short:
            break
    for _ in range(0 if is_short else _ROUNDS):
        # The evaluator holds the last trial, not the best order: run that one again.
        evaluator(device_of, best[1])
        priority = _raised(evaluator, best[1])
        score = evaluator(device_of, priority)
        if score >= best[0]:
            break
        best = score, priority
    return plan.ordered(priority=best[1])


def _raised(evaluator: Evaluator, priority: FloatArray) -> FloatArray:
    """Raise all critical ops by the longest wait of any of them; returns the new priorities.

    Priorities are in seconds, like bottom levels and latest starts; smaller runs first.
    """
    start_s = evaluator.op_start_s
    slack_s = latest_starts(evaluator, keeps_order=True) - start_s
    is_critical = slack_s <= _NO_SLACK * evaluator.score.step_s
    urgent_s = latest_starts(evaluator, keeps_order=False)
    # An op that had to start long before it did waited for its device.
    waited_s = np.max(start_s - urgent_s, where=is_critical, initial=0.0)
    return np.where(is_critical, priority - waited_s, priority)


ORDERS: dict[str, Callable[[Problem, Plan], Plan]] = {
    "topological": topological,
    "bottom-level": bottom_level,
    "earliest-start": earliest_start,
    "critical-refined": critical_refined,
}

GIVEN = "given"
"""Name for the order that a plan already has."""


def best_order(problem: Problem, plan: Plan, names: Sequence[str] = tuple(ORDERS)) -> Plan:
    """Return the plan in the best of its own order and the named ones; ``claims.order`` names it.

    Orders are compared by bytes beyond the devices' memory, then by step time, then by bytes on the
    fullest device, then by position in the list.
    """
    for name in names:
        if name not in ORDERS:
            raise unknown_name("order", name, ORDERS)
    evaluator = Evaluator(problem)
    best, best_name, best_rank = plan, GIVEN, _rank(evaluator, plan)
    for name in names:
        # Without an order the plan is in topological order already.
        if name == "topological" and plan.get(Order) is None:
            continue
        is_refined = name == "critical-refined"
        candidate = refined(evaluator, problem, plan) if is_refined else ORDERS[name](problem, plan)
        rank = _rank(evaluator, candidate)
        if rank < best_rank:
            best, best_name, best_rank = candidate, name, rank
    return best.claiming(order=best_name)


def _rank(evaluator: Evaluator, plan: Plan) -> tuple[float, float, int]:
    score = evaluator.plan(plan)
    fullest = int(evaluator.peak_bytes.max(initial=0))
    return score.overflow_bytes, score.step_s, fullest
