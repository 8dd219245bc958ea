"""Devices that a placement may use, and units of ops that each of them can run."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, IntArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.problem import Problem


def workers(problem: Problem) -> IntArray:
    """Return the accelerators, or all devices if there are only CPUs."""
    is_cpu = np.array([device.kind.is_cpu for device in problem.cluster.devices])
    chosen = np.flatnonzero(~is_cpu if not is_cpu.all() else is_cpu)
    return chosen.astype(np.int32)


def runnable(problem: Problem, unit: IntArray) -> BoolArray:
    """[device, unit]: True if every op of the unit can run on the device."""
    num_units = int(unit.max(initial=-1)) + 1
    can_run = np.ones((len(problem.costs.kind_names), num_units), dtype=bool)
    for row, seconds in enumerate(problem.costs.op_s):
        can_run[row, unit[~np.isfinite(seconds)]] = False
    return can_run[problem.costs.device_row]


def elsewhere(problem: Problem, unit: IntArray) -> IntArray:
    """Per unit: -1 if some worker can run it, else the first device that can."""
    can_run = runnable(problem, unit)
    needs_other = ~can_run[workers(problem)].any(axis=0)
    stuck = np.flatnonzero(~can_run.any(axis=0))
    if len(stuck):
        op = problem.graph.op_names[int(np.flatnonzero(unit == stuck[0])[0])]
        raise NoFeasiblePlanError(
            f"no device can run op {op!r} with the ops that must sit with it",
            hint="add a device of a kind that can run it",
        )
    return np.where(needs_other, can_run.argmax(axis=0), -1).astype(np.int32)
