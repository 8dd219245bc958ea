"""Bottom level: of the ready ops a device runs the one with the longest path to the end.

The classical priority of list scheduling (Hu 1961; upward rank in HEFT, Topcuoglu et al. 2002).
Paths include the transfers that this placement causes, no others. O(ops + reads).
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import levels, placement_of


def bottom_level(problem: Problem, plan: Plan) -> Plan:
    """The plan with priorities by bottom level."""
    to_end_s = levels(problem, placement_of(plan)).to_end_s
    return plan.ordered(priority=-to_end_s)
