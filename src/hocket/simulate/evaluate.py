"""Evaluate many plans of one problem: the numbers of `simulate`, without its timeline.

What does not depend on the plan is prepared once and the rest in compiled code, so that an
evaluation of a small graph takes a tenth of a simulation. The numbers are equal bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.arrays import ByteArray, FloatArray, IntArray
from hocket.errors import UsageError
from hocket.kernels.containers import zeros
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.bench import Changes, Walk, new_bench


class Score(NamedTuple):
    """How good a plan is: smaller is better, and the first difference decides."""

    overflow_bytes: float
    """Bytes that devices need beyond what they have, summed over devices."""
    step_s: float
    """Infinite, as ``overflow_bytes`` then, where an order makes ops wait for each other."""
    moved_bytes: float
    """Bytes of all transfers."""


_WORST = Score(np.inf, np.inf, np.inf)


class Evaluator:
    """Evaluates plans of one problem, one at a time.

    After each evaluation ``score``, ``op_start_s``, ``op_end_s`` and ``peak_bytes`` tell of that
    one; the arrays are the same every time.
    """

    def __init__(self, problem: Problem) -> None:
        self.bench, self.state, self.tables = new_bench(problem)
        self.op_start_s: FloatArray = self.state.spans.op_start_s
        self.op_end_s: FloatArray = self.state.spans.op_end_s
        self.peak_bytes: ByteArray = self.state.memory.peak
        self._no_change = changes_of(zeros(2), zeros(0), zeros(0), np.zeros(0))

    def __call__(
        self, device_of: IntArray, priority: FloatArray | None = None, *, is_strict: bool = False
    ) -> Score:
        """The score of a placement.

        Devices run ready ops by priority (smallest first; the position in the graph by default), or
        with ``is_strict`` all their ops in exactly that order. Every op must be on a device that
        exists and can run it.
        """
        ops = self.bench.ops
        ops.device[:] = device_of
        ops.priority[:] = np.arange(len(ops.device)) if priority is None else priority
        self.first_better(self._no_change, _WORST, is_strict=is_strict)
        return self.score

    def plan(self, plan: Plan) -> Score:
        """The score of a plan."""
        if plan.device_of is None:
            raise UsageError(
                "the plan does not say where ops run", hint="run a placement planner first"
            )
        if plan.order is None:
            return self(plan.device_of, plan.priority)
        return self(plan.device_of, order_priority(plan.order), is_strict=True)

    def first_better(self, changes: Changes, best: Score, *, is_strict: bool = False) -> int:
        """Try changes of what was evaluated last until one is better than ``best``.

        Returns its number, and it stays in ``bench.ops``; -1 where none is better. Takes over the
        arrays of ``changes``.
        """
        return self._try(changes, best, stops=True, is_strict=is_strict)[1]

    def walk(self, changes: Changes, start: Score) -> tuple[Score, IntArray, FloatArray]:
        """Make all changes of what was evaluated last, each kept if it is good enough.

        Returns score, devices and priorities of the best that was met, infinite if nothing was.
        """
        walk, _ = self._try(changes, start, stops=False, is_strict=False)
        device_of = walk.best_device.astype(np.int32)
        return Score(*walk.best.tolist()), device_of, walk.best_priority

    def _try(
        self, changes: Changes, start: Score, *, stops: bool, is_strict: bool
    ) -> tuple[Walk, int]:
        from hocket.simulate.refill import try_changes

        num_ops = 0 if stops else len(self.bench.ops.device)
        walk = Walk(
            present=np.array(start),
            stops=np.array([stops]),
            best=np.array(_WORST),
            best_device=zeros(num_ops),
            best_priority=np.zeros(num_ops),
        )
        found = try_changes(self.bench, self.state, self.tables, changes, walk, is_strict)
        return walk, found

    @property
    def score(self) -> Score:
        """The latest score."""
        return Score(*self.bench.score.tolist())


def changes_of(ptr: ByteArray, op: ByteArray, device: ByteArray, priority: FloatArray) -> Changes:
    """Changes of which each is good enough only if it is better."""
    return Changes(ptr, op, device, priority, np.full(len(op), -1), np.ones(len(ptr) - 1))


def order_priority(order: tuple[IntArray, ...]) -> FloatArray:
    """Priorities that say the same as strict orders: the position of each op on its device."""
    priority = np.zeros(sum(len(ops) for ops in order))
    for ops in order:
        priority[ops] = np.arange(len(ops))
    return priority


def evaluator(problem: Problem) -> Evaluator:
    """An evaluator of plans of ``problem``."""
    return Evaluator(problem)
