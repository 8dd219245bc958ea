"""One device: no parallelism, no transfers; the number that every other plan must beat.

Takes the fastest device on which the whole step fits, or, where it fits nowhere, the one with the
most memory so that the shortage shown is the smallest. O(kinds of device · (ops + reads)).
"""

from __future__ import annotations

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.candidates import empty_plan
from hocket.simulate.engine import simulate

ONE_DEVICE = "one-device"
"""The name of this planner."""


def on_one_device(problem: Problem) -> Plan:
    """A plan of this planner alone."""
    return one_device(problem, empty_plan(problem, ONE_DEVICE))


def one_device(problem: Problem, plan: Plan) -> Plan:
    """Place every op on the best single device."""
    seconds = problem.costs.op_s.sum(axis=1)[problem.costs.device_row]
    memory = problem.memory_bytes
    order = sorted(range(len(memory)), key=lambda d: (seconds[d], -memory[d], d))
    tried: set[tuple[int, int]] = set()
    for device in order:
        alike = (int(problem.costs.device_row[device]), int(memory[device]))
        if alike in tried or not np.isfinite(seconds[device]):
            continue
        tried.add(alike)
        candidate = _all_on(problem, plan, device)
        if simulate(problem, candidate).peak_bytes[device] <= memory[device]:
            return candidate
    able = [device for device in order if np.isfinite(seconds[device])]
    if not able:
        raise NoFeasiblePlanError("no single device can run every op")
    return _all_on(problem, plan, max(able, key=lambda d: (memory[d], -d)))


def _all_on(problem: Problem, plan: Plan, device: int) -> Plan:
    return plan.having(Placement(np.full(problem.graph.num_ops, device, dtype=np.int32)))
