"""A problem in whole ticks of time and blocks of memory, rounded so that bounds stay true.

Times are rounded down to ticks. Take any plan, with its real times counted in ticks, and round
every start down: floor(start + duration) >= floor(start) + floor(duration), so whatever came after
something else still does, and the rounded plan is a solution of the rounded problem. A proof about
the rounded problem therefore holds for the real one. Bytes are rounded down to blocks for the same
reason: what fits, fits in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.graph.graph import Role
from hocket.plan.problem import Problem
from hocket.planners.bounds.units import BoundUnits
from hocket.planners.tables import TaskTable

HORIZON_TICKS = 10**8
"""Ticks of the longest step of interest: rounding costs each op at most 1e-8 of it."""
_ROUND_SCALES = tuple(10.0**power for power in range(10))
_NEARLY_WHOLE = 1e-12
_MEMORY_BLOCKS = 2**20


@dataclass(frozen=True)
class Read:
    """One op reads one tensor that may have to be transferred to it."""

    tensor: int
    source: int
    """The op that makes the tensor; -1 where it exists before the step."""
    home: int
    """The op on whose device the tensor is at home."""
    reader: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Instance:
    """All numbers that the model needs."""

    problem: Problem
    tasks: TaskTable
    units: BoundUnits
    ticks_per_s: float
    slack_ticks: int
    """By how much rounding can move a moment: 0 where every time is a whole number of ticks."""
    bytes_per_block: int
    op_ticks: LongArray
    """[device, op]: -1 where the op cannot run."""
    reads: tuple[Read, ...]
    longest_s: float
    """Seconds of the longest step of interest."""

    def transfer_ticks(self, tensor: int) -> LongArray:
        """[src, dst]: ticks of moving a tensor; 0 on the diagonal."""
        seconds = self.tasks.latency_s + self.tasks.work[tensor] * self.tasks.unit_s
        return self.ticks(np.where(np.eye(len(seconds), dtype=np.bool_), 0.0, seconds))

    def ticks(self, seconds: FloatArray) -> LongArray:
        """Whole ticks, rounded down."""
        return _floor(seconds, self.ticks_per_s)

    def blocks(self, num_bytes: int) -> int:
        """Whole blocks, rounded down."""
        return num_bytes // self.bytes_per_block


def make_instance(problem: Problem, tasks: TaskTable, units: BoundUnits, step_s: float) -> Instance:
    """The instance for plans with a step of at most ``step_s``."""
    ticks_per_s, slack_ticks = _grid(tasks, step_s)
    able = np.ones((len(tasks.op_s), units.count), dtype=np.bool_)
    for device, seconds in enumerate(tasks.op_s):
        able[device, units.of_op[~np.isfinite(seconds)]] = False
    op_s = np.where(able[:, units.of_op], tasks.op_s, 0.0)
    op_ticks = np.where(able[:, units.of_op], _floor(op_s, ticks_per_s), -1)
    return Instance(
        problem=problem,
        tasks=tasks,
        units=units,
        ticks_per_s=ticks_per_s,
        slack_ticks=slack_ticks,
        bytes_per_block=max(1, int(problem.memory_bytes.max()) // _MEMORY_BLOCKS),
        op_ticks=op_ticks,
        reads=tuple(_reads(problem, units)),
        longest_s=step_s,
    )


def longest_step_s(tasks: TaskTable, units: BoundUnits, problem: Problem) -> float:
    """Seconds within which any plan is done: each op and each transfer alone, at its slowest."""
    slowest_s = np.where(np.isfinite(tasks.op_s), tasks.op_s, 0.0).max(axis=0).sum()
    sent = [read.tensor for read in _reads(problem, units)]
    transfer_s = tasks.latency_s.max() + tasks.work[sent] * tasks.unit_s.max()
    return float(slowest_s + transfer_s.sum())


def _reads(problem: Problem, units: BoundUnits) -> list[Read]:
    graph = problem.graph
    reader = graph.reader.tolist()
    reads = []
    for op, tensor in zip(reader, graph.reads.tolist(), strict=True):
        source = int(graph.tensor_producer[tensor])
        # The batch is, free of charge, wherever it is read.
        if source >= 0 or graph.tensor_role[tensor] != Role.INPUT:
            reads.append(Read(tensor, source, int(units.home_op[tensor]), op))
    return reads


def _floor(seconds: FloatArray, ticks_per_s: float) -> LongArray:
    # A product a rounding error below a whole number is meant to be that number.
    return np.floor(seconds * ticks_per_s * (1 + _NEARLY_WHOLE)).astype(np.int64)


def _grid(tasks: TaskTable, step_s: float) -> tuple[float, int]:
    """Ticks per second and slack: a power of ten that makes every time whole, or a fine grid."""
    finest = HORIZON_TICKS / step_s if step_s > 0 else 1.0
    times = [tasks.op_s[np.isfinite(tasks.op_s)]]
    times += [np.ravel(tasks.latency_s + work * tasks.unit_s) for work in np.unique(tasks.work)]
    seconds = np.concatenate(times)
    for scale in _ROUND_SCALES:
        ticks = seconds * scale
        wholes = np.round(ticks)
        if scale <= finest and np.all(np.abs(ticks - wholes) <= _NEARLY_WHOLE * wholes):
            return scale, 0
    return finest, 1
