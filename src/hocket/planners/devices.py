"""Devices that a placement may use, and units of ops that each of them can run.

Ops run on accelerators (`workers`) unless only another device, such as a CPU, can run them
(`elsewhere`).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.problem import Problem


def workers(problem: Problem) -> IntArray:
    """Return the accelerators, or all devices if there are only CPUs."""
    is_cpu = np.array([device.kind.is_cpu for device in problem.cluster.devices])
    chosen = np.flatnonzero(~is_cpu if not is_cpu.all() else is_cpu)
    return chosen.astype(np.int32)


def runnable(problem: Problem, unit: IntArray) -> BoolArray:
    """[device, unit]: True if every op of the unit can run on the device."""
    return _able_types(problem, unit)[problem.costs.device_row]


def op_s_of_units(problem: Problem, unit: IntArray) -> FloatArray:
    """[device type, op]: seconds; infinite where some op of the same unit cannot run."""
    return np.where(_able_types(problem, unit)[:, unit], problem.costs.op_s, np.inf)


def require_runnable(problem: Problem, unit: IntArray) -> None:
    """Raise `NoFeasiblePlanError` if some unit can run on no device."""
    stuck = np.flatnonzero(~runnable(problem, unit).any(axis=0))
    if len(stuck):
        op = problem.graph.op_names[int(np.flatnonzero(unit == stuck[0])[0])]
        raise NoFeasiblePlanError(
            f"no device can run op {op!r} with the ops that must sit with it",
            hint="add a device of a kind that can run it",
        )


def elsewhere(problem: Problem, unit: IntArray) -> IntArray:
    """Per unit: -1 if some worker can run it, else the first device that can."""
    require_runnable(problem, unit)
    can_run = runnable(problem, unit)
    needs_other = ~can_run[workers(problem)].any(axis=0)
    return np.where(needs_other, can_run.argmax(axis=0), -1).astype(np.int32)


def _able_types(problem: Problem, unit: IntArray) -> BoolArray:
    """[device type, unit]: True if every op of the unit can run on devices of the type."""
    num_units = int(unit.max(initial=-1)) + 1
    can_run = np.ones((len(problem.costs.kind_names), num_units), dtype=bool)
    for row, seconds in enumerate(problem.costs.op_s):
        can_run[row, unit[~np.isfinite(seconds)]] = False
    return can_run
