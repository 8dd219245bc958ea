"""Earliest start: ops run in the order in which they could start if devices were never busy.

Keeps independent branches level with each other where the bottom level would finish the longest
first; of ops that could start together the one with the longest path to the end comes first.
O(ops log ops + reads).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import positions
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import levels, placement_of


def earliest_start(problem: Problem, plan: Plan) -> Plan:
    """The plan with priorities by earliest start."""
    found = levels(problem, placement_of(plan))
    sequence = np.lexsort((-found.to_end_s, found.from_start_s))
    return plan.ordered(priority=positions(sequence).astype(np.float64))
