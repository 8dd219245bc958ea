"""Where tensors first are and what their transfers take, for one placement or a table of them."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.planners.tables import TaskTable

_Column = IntArray | int


def transfer_s(tasks: TaskTable, tensor: int, src: _Column, dst: _Column) -> FloatArray:
    """Seconds that a tensor takes from one device to another with nothing else on the way."""
    if tasks.is_everywhere[tensor]:
        return np.zeros(np.shape(dst))
    delay_s: FloatArray = tasks.latency_s[src, dst] + tasks.work[tensor] * tasks.unit_s[src, dst]
    return delay_s


def home_of(problem: Problem, tensor: int, device_of: IntArray) -> _Column:
    """Where a tensor first is; ``device_of`` has ops as its last axis."""
    op = int(problem.graph.home_op[tensor])
    column: _Column = device_of[..., op] if op >= 0 else 0
    return column
