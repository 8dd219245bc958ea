"""Max-load: split a graph so that the load of the busiest device is as small as possible.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020.
Files in the order from a problem to a plan: `load_pieces` (ops that move together),
`device_classes`, `stage_split` (exact contiguous splits), `contiguous_split`,
`load_annealing` (any placement), `load_bound` (lower bounds), `max_load_planner` (the planners).
Each planner is imported when it is called.
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem

__all__ = ["dpl", "pipedream", "throughput"]


def throughput(problem: Problem, plan: Plan) -> Plan:
    """Place every op so that the load of the busiest device is as small as possible."""
    from hocket.planners.max_load.max_load_planner import throughput

    return throughput(problem, plan)


def dpl(problem: Problem, plan: Plan) -> Plan:
    """Cut a topological order into stages with the smallest maximum load for that order."""
    from hocket.planners.max_load.max_load_planner import dpl

    return dpl(problem, plan)


def pipedream(problem: Problem, plan: Plan) -> Plan:
    """Cut the model into stages where a single piece connects the parts before and after it."""
    from hocket.planners.max_load.max_load_planner import pipedream

    return pipedream(problem, plan)
