"""All placements of a tiny graph, each with a bound that no order of its ops can beat.

A placement is a row of a table; the bound of all rows is computed at once: the longest path with
its transfers, and for each device the work there after the first of its ops can start and before
the last lets the step end. What is held to the end must fit. Devices that are alike are used in
turn. Rows grow unit by unit, and one that can no longer be shorter than a known step is dropped as
it grows (`Prefixes`). O(placements x (ops x devices + reads)), in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.planners.bounds.units import find_units
from hocket.planners.placement.devices import runnable
from hocket.planners.placement.exact.prefixes import Prefixes
from hocket.planners.placement.exact.symmetry import interchangeable
from hocket.planners.placement.exact.transfers import home_of, transfer_s
from hocket.planners.tables import TaskTable, task_table


class Placements(NamedTuple):
    """Placements as rows."""

    device_of: IntArray
    """[placement, op]"""
    bound_s: FloatArray
    """Per placement: no order makes its step shorter; infinite where none fits."""


def alike(problem: Problem) -> list[list[int]]:
    """Sets of devices that may be exchanged."""
    if problem.transfers == "queued" and problem.cluster.num_devices > 2:
        return []  # copies of a tensor are queued in the order of the devices that they go to
    # What no op reads is on the first device, which is then unlike the others.
    fixed = frozenset({0}) if find_units(problem.graph).unread_bytes else frozenset()
    return interchangeable(problem, task_table(problem), fixed)


def bounded_placements(
    problem: Problem, max_count: int, known_s: float = np.inf
) -> Placements | None:
    """All placements that may be shorter than ``known_s``, with their bounds.

    None where there are more than ``max_count``.
    """
    unit_of = find_units(problem.graph).of_op
    rows = _rows(problem, unit_of, max_count, known_s)
    if rows is None:
        return None
    device_of = rows[:, unit_of]
    bound_s = _bound_s(problem, task_table(problem), device_of)
    bound_s[~_holds(problem, task_table(problem), device_of)] = np.inf
    return Placements(device_of, bound_s)


def _rows(problem: Problem, unit_of: IntArray, max_count: int, known_s: float) -> IntArray | None:
    """The devices of units in all ways, those that are alike in the order of their first use."""
    can_run, num_devices = runnable(problem, unit_of), problem.cluster.num_devices
    twin = np.full(num_devices, -1)
    for devices in alike(problem):
        twin[devices[1:]] = devices[:-1]
    prefixes = Prefixes(problem, unit_of, known_s)
    grown = prefixes.none()
    for unit in range(can_run.shape[1]):
        parts = []
        for device in np.flatnonzero(can_run[:, unit]).tolist():
            is_open = np.ones(len(grown.rows), dtype=np.bool_)
            if twin[device] >= 0:
                is_open = (grown.rows == twin[device]).any(axis=1)
            parts.append(prefixes.extended(grown, is_open, unit, device))
        grown = prefixes.joined(parts, unit + 1)
        if len(grown.rows) > max_count:
            return None
    return grown.rows


def _bound_s(problem: Problem, tasks: TaskTable, device_of: IntArray) -> FloatArray:
    num_ops, ptr = problem.graph.num_ops, tasks.read_ptr
    op_s = tasks.op_s[device_of, np.arange(num_ops)]
    ready_s, tail_s = np.zeros(op_s.shape), np.zeros(op_s.shape)
    links = [
        (op, int(tasks.producer[t]), transfer_s(tasks, t, home_of(problem, t, device_of), there))
        for op in range(num_ops)
        for there in [device_of[:, op]]
        for t in tasks.reads[ptr[op] : ptr[op + 1]].tolist()
    ]
    for op, maker, delay_s in links:
        made_s = ready_s[:, maker] + op_s[:, maker] if maker >= 0 else 0.0
        ready_s[:, op] = np.maximum(ready_s[:, op], made_s + delay_s)
    for op, maker, delay_s in reversed(links):
        if maker >= 0:
            after_s = delay_s + op_s[:, op] + tail_s[:, op]
            tail_s[:, maker] = np.maximum(tail_s[:, maker], after_s)
    bound_s: FloatArray = (ready_s + op_s + tail_s).max(axis=1)
    for device in range(problem.cluster.num_devices):
        here = device_of == device
        first_s = np.where(here, ready_s, np.inf).min(axis=1)
        last_s = np.where(here, tail_s, np.inf).min(axis=1)
        load_s = first_s + np.where(here, op_s, 0.0).sum(axis=1) + last_s
        bound_s = np.maximum(bound_s, np.where(here.any(axis=1), load_s, 0.0))
    return bound_s


def _holds(problem: Problem, tasks: TaskTable, device_of: IntArray) -> BoolArray:
    """Whether devices have room for what stays at its home to the end of the step."""
    held_bytes = np.zeros((len(device_of), problem.cluster.num_devices), dtype=np.int64)
    row = np.arange(len(device_of))
    for tensor in np.flatnonzero(tasks.is_held).tolist():
        held_bytes[row, home_of(problem, tensor, device_of)] += tasks.held_bytes[tensor]
    fits: BoolArray = np.all(held_bytes <= problem.memory_bytes, axis=1)
    return fits
