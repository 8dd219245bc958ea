"""Every plan of a tiny graph, as the simulator sees it: placements, orders, copies and frees.

Where memory is tight, what fits hangs on the moment at which each copy comes and goes, which a
constraint model cannot say; the simulator can. So every placement is bounded (`every_placement`)
and, in the order of these bounds, tried with every order of its devices' ops (`every_order`). A
strict order says all that a plan can say, so what is found is the shortest step of any plan, and
where nothing is found nothing fits.
Exponential; the work is counted in runs of the engine, each about a tenth of a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial, prod

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds.units import find_units
from hocket.planners.placement.devices import runnable
from hocket.planners.placement.exact.every_order import NOISE, OrderSearch
from hocket.planners.placement.exact.every_placement import alike, bounded_placements

MAX_OPS = 28
MAX_RUNS = 20_000
"""Runs of the engine after which planners stop to try: about two seconds."""
_MAX_PLACEMENTS = 300_000
"""Twelve ops on three devices of which two are alike; bounding them takes about a second. A known
step that is nearly the shortest leaves so few of more ops on more devices."""


@dataclass(frozen=True, eq=False)
class ExhaustiveAnswer:
    """The best plan that was found and what is known of all others."""

    plan: Plan | None
    """None where nothing better than the known step was found."""
    bound_s: float
    """No plan has a shorter step; infinite where no plan fits."""
    is_complete: bool
    """Whether every plan was tried or ruled out."""


def can_be_tried(problem: Problem) -> bool:
    """Whether a plan of the problem is a placement and an order per device, of few ops."""
    if problem.objective != "latency" or problem.contiguous:
        return False
    # The streams of one device run side by side, which an order per device does not say.
    return 0 < problem.graph.num_ops <= MAX_OPS and not problem.graph.op_stream.any()


def is_tiny(problem: Problem) -> bool:
    """Whether there are few enough placements to look at each."""
    if not can_be_tried(problem):
        return False
    units = find_units(problem.graph)
    num_able = runnable(problem, units.of_op).sum(axis=0).astype(float)
    num_alike = prod(factorial(len(found)) for found in alike(problem))
    return bool(num_able.prod() <= _MAX_PLACEMENTS * num_alike)


def try_all(
    problem: Problem, plan: Plan, max_runs: int, known_s: float = np.inf
) -> ExhaustiveAnswer:
    """The plan with the shortest step below ``known_s``, within ``max_runs`` runs of the engine."""
    placements = bounded_placements(problem, _MAX_PLACEMENTS, known_s * (1 - NOISE))
    if placements is None:
        return ExhaustiveAnswer(None, 0.0, is_complete=False)
    search = OrderSearch(problem, max_runs, known_s)
    open_s = np.inf  # a bound on what was not tried
    for index in np.argsort(placements.bound_s, kind="stable").tolist():
        bound_s = float(placements.bound_s[index])
        if not search.is_hopeful(bound_s):
            break
        if not search.try_orders(placements.device_of[index]):
            open_s = bound_s
            break
    bound_s = min(search.best_s, open_s) * (1 - NOISE)  # what is shorter by less is not looked for
    found = None
    if search.best is not None:
        device_of, order = search.best
        found = plan.placing(device_of, by_device=order)
    return ExhaustiveAnswer(found, bound_s, is_complete=open_s == np.inf)
