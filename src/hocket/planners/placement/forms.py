"""Run a placement algorithm on forward groups, step groups and single ops, and keep the best plan.

Groups of the forward pass keep weights with their readers and backward ops with what they need, and
make a graph small; but a group runs on one device, and where branches meet it may swallow all of
them, so that nothing is left to run in parallel. Groups of the whole step place backward ops
independently of forward ops. No form is the best one everywhere (on generated graphs each takes up
to twice as long as another), so all plan, and the simulator chooses. On large graphs, where a
second plan takes long, only one does: single ops where groups make the longest path much longer
than the work needs, groups of the forward pass elsewhere.
O(the three planners), besides three simulations.
"""

from __future__ import annotations

from functools import wraps

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import levels
from hocket.planners.placement.coarse import (
    coarse_problem,
    coarsely,
    describe_form,
    fastest_s,
    forward_coarsely,
    forward_coarsened,
)
from hocket.planners.placement.devices import workers
from hocket.planners.shared import Planner, is_large
from hocket.simulate.engine import simulate

_HIDDEN = 1.5
"""Groups hide parallelism where no plan of them is shorter than this times a plan of single ops."""


def better_form(planner: Planner) -> Planner:
    """A planner that plans groups of both sorts and single ops, and keeps the best plan."""
    on_groups, on_step = forward_coarsely(planner), coarsely(planner)

    @wraps(planner)
    def planned(problem: Problem, plan: Plan) -> Plan:
        if is_large(problem.graph.num_ops):
            return (
                planner(problem, plan) if hides_parallelism(problem) else on_groups(problem, plan)
            )
        return _better(problem, plan, {"groups": on_groups, "ops": planner, "step": on_step})

    planned.__doc__ = describe_form(planner, "The best of groups and single ops")
    return planned


def hides_parallelism(problem: Problem) -> bool:
    """True if steps on groups are bound to be much longer than on single ops."""
    work_s = float(fastest_s(problem).sum()) / len(workers(problem))
    coarse = coarse_problem(problem, forward_coarsened(problem))
    return max(_path_s(coarse), work_s) > _HIDDEN * max(_path_s(problem), work_s)


def _path_s(problem: Problem) -> float:
    """Seconds of the longest path, all of it on the first worker."""
    alone = np.full(problem.graph.num_ops, workers(problem)[0], dtype=np.int32)
    return float(levels(problem, alone).to_end_s.max(initial=0.0))


def _better(problem: Problem, plan: Plan, forms: dict[str, Planner]) -> Plan:
    found: list[tuple[tuple[int, float], int, Plan]] = []
    refusal = None
    for name, planner in forms.items():
        try:
            made = planner(problem, plan)
        except NoFeasiblePlanError as error:
            refusal = refusal or error
            continue
        made = made.claiming(form=name)
        found.append((_rank(problem, made), len(found), made))
    if not found and refusal is not None:
        raise refusal
    return min(found)[-1]


def _rank(problem: Problem, plan: Plan) -> tuple[int, float]:
    """Bytes that devices lack, then seconds."""
    timeline = simulate(problem, plan)
    lacking = np.maximum(timeline.peak_bytes - problem.memory_bytes, 0)
    return int(lacking.sum()), timeline.makespan_s
