"""Device classes: devices that run every op equally fast, as the bounds see them.

A bound needs the times of ops per class and, between classes, the least that a transfer can take:
the smallest latency and the smallest time per unit of work over all pairs of different devices.
A class with one device has no pair with itself, so a transfer inside it takes for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.problem import Problem
from hocket.planners.bounds.units import BoundUnits
from hocket.planners.tables import task_table

MAX_CLASSES = 6
"""Above this all devices count as one class that runs each op as fast as the fastest of them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundClasses:
    """Classes of devices, and what ops and transfers take on them at least."""

    op_s: FloatArray
    """[class, op]: infinite where the op, or one that sits with it, cannot run."""
    of_device: LongArray
    """The class of each device."""
    num_devices: LongArray
    memory_bytes: LongArray
    """Usable bytes of all devices of the class together."""
    latency_s: FloatArray
    """[src class, dst class]: a lower bound for two different devices."""
    unit_s: FloatArray
    """[src class, dst class]: as `latency_s`, per unit of work."""
    work: FloatArray
    """Per tensor: what a transfer of it has to move."""


def find_classes(problem: Problem, units: BoundUnits) -> BoundClasses:
    """The classes of a problem's devices; raises where some op can run nowhere."""
    tasks = task_table(problem)
    class_of = _class_of(problem)
    count = int(class_of.max()) + 1
    op_s = np.array([tasks.op_s[class_of == index].min(axis=0) for index in range(count)])
    memory_bytes = np.maximum(tasks.memory_bytes - _unread(problem, units), 0)
    latency_s = _least(tasks.latency_s, class_of)
    return BoundClasses(
        op_s=_op_s_of_units(problem, units, op_s),
        of_device=class_of,
        num_devices=np.bincount(class_of, minlength=count).astype(np.int64),
        memory_bytes=np.bincount(class_of, weights=memory_bytes, minlength=count).astype(np.int64),
        latency_s=latency_s,
        unit_s=np.where(np.isinf(latency_s), 0.0, _least(tasks.unit_s, class_of)),
        work=tasks.work,
    )


def _class_of(problem: Problem) -> LongArray:
    """The class of each device, densely numbered."""
    _, class_of = np.unique(problem.costs.device_row, return_inverse=True)
    if class_of.max(initial=0) >= MAX_CLASSES:
        return np.zeros(len(class_of), dtype=np.int64)
    return class_of.astype(np.int64)


def _unread(problem: Problem, units: BoundUnits) -> LongArray:
    unread = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    unread[0] = units.unread_bytes
    return unread


def _op_s_of_units(problem: Problem, units: BoundUnits, op_s: FloatArray) -> FloatArray:
    """Infinite for all ops of a unit where it is infinite for one of them."""
    able = np.ones((len(op_s), units.count), dtype=np.bool_)
    for row, seconds in enumerate(op_s):
        able[row, units.of_op[~np.isfinite(seconds)]] = False
    num_able = np.count_nonzero(able, axis=0)
    stuck = np.flatnonzero(num_able[units.of_op] == 0)
    if len(stuck):
        raise NoFeasiblePlanError(
            f"no device can run op {problem.graph.op_names[stuck[0]]!r} with the ops that must "
            "sit with it",
            hint="add a device of a kind that can run it",
        )
    return np.where(able[:, units.of_op], op_s, np.inf)


def _least(matrix: FloatArray, class_of: LongArray) -> FloatArray:
    """[src class, dst class]: the smallest entry of two different devices."""
    count = int(class_of.max()) + 1
    between = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(between, np.inf)
    least = np.full((count, count), np.inf)
    np.minimum.at(least, (class_of[:, None], class_of[None, :]), between)
    return least
