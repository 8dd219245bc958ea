"""Levels: how far each op is from the start and from the end, in seconds, where ops are placed.

The length of a path is the time of its ops on their devices and of the transfers that the placement
causes, each alone on its way. O(ops + reads).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.errors import UsageError
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem


class Levels(NamedTuple):
    """Longest paths per op."""

    to_end_s: FloatArray
    """From its start to the end of the step."""
    from_start_s: FloatArray
    """From the beginning of the step to its start."""


def levels(problem: Problem, device_of: IntArray) -> Levels:
    """The levels of every op."""
    from hocket.planners.order.level_kernels import Placed, fill_levels

    graph, costs = problem.graph, problem.costs
    stated, routes = costs.tensor_s is not None, costs.routes
    placed = Placed(
        device=table(device_of, np.int64),
        duration_s=table(
            costs.op_s[costs.device_row[device_of], np.arange(graph.num_ops)], np.float64
        ),
        made_ptr=table(graph.made_ptr, np.int64),
        user_ptr=table(graph.user_ptr, np.int64),
        users=table(graph.users, np.int64),
        work=table(costs.tensor_bytes if costs.tensor_s is None else costs.tensor_s, np.float64),
        latency_s=table(routes.latency_s, np.float64),
        unit_s=table(routes.hops if stated else 1 / routes.bandwidth_bps, np.float64),
    )
    found = Levels(np.zeros(graph.num_ops), np.zeros(graph.num_ops))
    fill_levels(placed, found.to_end_s, found.from_start_s)
    return found


def placement_of(plan: Plan) -> IntArray:
    """The placement of a plan; raises `UsageError` where it has none."""
    if plan.device_of is None:
        raise UsageError(
            "the plan does not say where ops run",
            hint="run a placement planner before the order",
            where=plan.planner,
        )
    return plan.device_of
