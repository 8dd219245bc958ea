"""Devices that can be exchanged without changing any number of the problem."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.planners.tables import TaskTable


def interchangeable(problem: Problem, tasks: TaskTable, fixed: frozenset[int]) -> list[list[int]]:
    """Sets of devices, each of which may be permuted at will; ``fixed`` ones stay alone.

    Being exchangeable is transitive: exchanging a with b, b with c and a with b again exchanges a
    with c.
    """
    sets: list[list[int]] = []
    for device in range(problem.cluster.num_devices):
        for found in sets:
            if not {device, found[0]} & fixed and _can_swap(problem, tasks, found[0], device):
                found.append(device)
                break
        else:
            sets.append([device])
    return sets


def _can_swap(problem: Problem, tasks: TaskTable, first: int, second: int) -> bool:
    swap = np.arange(problem.cluster.num_devices)
    swap[[first, second]] = second, first
    half_duplex = tasks.send_queue == tasks.receive_queue
    rows: tuple[NDArray[np.generic], ...] = (tasks.op_s, tasks.memory_bytes, half_duplex)
    pairs: tuple[FloatArray, ...] = (tasks.latency_s, tasks.unit_s)
    return all(np.array_equal(row[swap], row) for row in rows) and all(
        np.array_equal(matrix[np.ix_(swap, swap)], matrix) for matrix in pairs
    )


def first_use_order(device_of_unit: IntArray, sets: list[list[int]]) -> IntArray:
    """The same placement with the devices of each set taken in the order of their first use."""
    renamed = np.arange(max(max(devices) for devices in sets) + 1, dtype=np.int32)
    for devices in sets:
        used = [device for device in dict.fromkeys(device_of_unit.tolist()) if device in devices]
        unused = [device for device in devices if device not in used]
        renamed[used + unused] = devices
    placed: IntArray = renamed[device_of_unit]
    return placed
