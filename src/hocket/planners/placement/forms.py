"""One algorithm in two forms, on groups of ops and on single ops: the better of the two.

Groups of the forward pass keep weights with their readers and backward ops with what they need, and
make a graph small; but a group runs on one device, and where branches meet it may swallow all of
them, so that nothing is left to run in parallel. Neither form is the better one everywhere (on
generated graphs either takes up to twice as long as the other), so both plan, and the simulator
chooses. Above `_LARGE` ops, where a second plan takes long, only one does: single ops where groups
make the longest path much longer than the work needs, groups elsewhere.
O(both planners), besides two simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import levels
from hocket.planners.placement.coarse import (
    coarse_problem,
    fastest_s,
    forward_coarsely,
    forward_coarsened,
)
from hocket.planners.placement.devices import workers
from hocket.simulate.engine import simulate

_LARGE = 50_000
_HIDDEN = 1.5
"""Groups hide parallelism where no plan of them is shorter than this times a plan of single ops."""

_Planner = Callable[[Problem, Plan], Plan]


def better_form(planner: _Planner) -> _Planner:
    """A planner that plans groups and single ops, and keeps the better plan."""
    on_groups = forward_coarsely(planner)

    @wraps(planner)
    def planned(problem: Problem, plan: Plan) -> Plan:
        if problem.graph.num_ops > _LARGE:
            return (
                planner(problem, plan) if hides_parallelism(problem) else on_groups(problem, plan)
            )
        return _better(problem, plan, {"groups": on_groups, "ops": planner})

    return planned


def hides_parallelism(problem: Problem) -> bool:
    """Whether steps on groups are bound to be much longer than on single ops."""
    work_s = float(fastest_s(problem).sum()) / len(workers(problem))
    coarse = coarse_problem(problem, forward_coarsened(problem))
    return max(_path_s(coarse), work_s) > _HIDDEN * max(_path_s(problem), work_s)


def _path_s(problem: Problem) -> float:
    """Seconds of the longest path, all of it on the first worker."""
    alone = np.full(problem.graph.num_ops, workers(problem)[0], dtype=np.int32)
    return float(levels(problem, alone).to_end_s.max(initial=0.0))


def _better(problem: Problem, plan: Plan, forms: dict[str, _Planner]) -> Plan:
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
