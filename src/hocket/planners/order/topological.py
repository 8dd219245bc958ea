"""Topological order: each device runs whatever is ready and stands first in the graph.

For captured graphs that is the order in which the program itself would run. O(1).
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import placement_of


def topological(problem: Problem, plan: Plan) -> Plan:
    """The plan without an order or priorities of its own."""
    placement_of(plan)
    return plan.ordered()
