"""In which order each device runs its ops, once it is known which ops it runs.

The same placement can take twice as long in another order, and no rule for the order is the best
everywhere, so plans are tried with several. Ops that draw random numbers are seeded one by one when
they run, so any order gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hocket.base.errors import unknown_name
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Order
from hocket.planners.order.bottom_level import bottom_level
from hocket.planners.order.critical_refined import critical_refined, refined
from hocket.planners.order.earliest_start import earliest_start
from hocket.planners.order.topological import topological
from hocket.simulate.evaluate import Evaluator

ORDERS: dict[str, Callable[[Problem, Plan], Plan]] = {
    "topological": topological,
    "bottom-level": bottom_level,
    "earliest-start": earliest_start,
    "critical-refined": critical_refined,
}

GIVEN = "given"
"""Name of the order that a plan comes with."""


def best_order(problem: Problem, plan: Plan, names: Sequence[str] = tuple(ORDERS)) -> Plan:
    """The plan in the best of its own order and those named, which ``claims.order`` then names.

    The least memory beyond what devices have counts first, then the shortest step, then the least
    bytes at the fullest device, then the place in the list.
    """
    for name in names:
        if name not in ORDERS:
            raise unknown_name("order", name, ORDERS)
    evaluator = Evaluator(problem)
    best, best_name, best_rank = plan, GIVEN, _rank(evaluator, plan)
    for name in names:
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
