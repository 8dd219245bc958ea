"""The present plan of a local search, its score, and how many evaluations are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import latest_starts, levels
from hocket.simulate.evaluate import Changes, Evaluator, Score, changes_of

NO_SLACK = 1e-9
"""Share of the step below which slack is rounding."""


@dataclass(frozen=True)
class Change:
    """Ops that would go to a device each, and perhaps to another place in the order."""

    ops: LongArray
    devices: LongArray
    priorities: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A plan that a search was at."""

    device_of: IntArray
    priority: FloatArray
    is_strict: bool
    score: Score


class LocalSearch:
    """Accepts changes that make the score better; what is left of the budget ends the search."""

    def __init__(self, problem: Problem, plan: Plan, budget: int) -> None:
        assert plan.device_of is not None, "the search starts from a placement"
        self.problem, self.plan, self.budget = problem, plan, budget
        self.evaluator = Evaluator(problem)
        self.score = self.evaluator.plan(plan)
        self.device_of: IntArray = np.array(plan.device_of, dtype=np.int32)
        self.priority: FloatArray = self.evaluator.runs.priority.copy()
        self.is_strict = plan.by_device is not None
        if self.is_strict:
            self._number_by_start()
        self.is_shown = True
        """True if the evaluator holds the results of the current plan."""

    def show(self) -> None:
        """Make the evaluator show the present plan."""
        if not self.is_shown:
            self.score = self._evaluate(self.device_of, self.priority, self.is_strict)
            self.is_shown = True

    def first_better(self, changes: Sequence[Change]) -> int:
        """Accept the first of the changes that is better; its position, or -1."""
        changes = changes[: self.budget]
        if not changes:
            return -1
        self._load_current()
        table = self._table(changes)
        found = self.evaluator.first_better(table, self.score, is_strict=self.is_strict)
        self.budget -= len(changes) if found < 0 else found + 1
        self.is_shown = found >= 0
        if found >= 0:
            self._take()
        return found

    def walk(self, changes: Changes) -> None:
        """Go through changes that may also make things worse; ends at the best that was met.

        Devices are not held to their order during the walk, nor at its end.
        """
        self._load_current()
        self.budget -= len(changes.tolerance)
        score, device_of, priority = self.evaluator.walk(changes, self.score)
        self.is_shown = False
        if score < self.score:
            self.score, self.device_of, self.priority = score, device_of, priority
            self.is_strict = False
            self._number()

    def try_order(self, priority: FloatArray) -> bool:
        """Accept priorities for the present placement if they are better."""
        if self.budget <= 0:
            return False
        score = self._evaluate(self.device_of, priority, is_strict=False)
        self.is_shown = score < self.score
        if self.is_shown:
            self.priority, self.is_strict = priority.copy(), False
            self.score = score
        return self.is_shown

    def try_fresh_order(self) -> None:
        """Accept, if they are better, bottom levels as priorities, else latest starts.

        The latter are how late ops could start in the present step, so in contrast to bottom levels
        they know how long transfers wait for each other.
        """
        if not self.try_order(-levels(self.problem, self.device_of).to_end_s):
            self.try_latest_starts()

    def try_latest_starts(self) -> None:
        """Accept latest starts as priorities if they are better."""
        self.show()
        self.try_order(latest_starts(self.evaluator, keeps_order=False))

    def make_strict(self) -> None:
        """Hold devices to the order in which they run ops now, which changes nothing yet."""
        self.show()
        self._number_by_start()
        self.is_strict = True

    def jump(self, changes: Sequence[Change]) -> None:
        """Accept changes whatever they cost."""
        for change in changes:
            self.device_of[change.ops] = change.devices
            if change.priorities is not None:
                self.priority[change.ops] = change.priorities
        self.score = self._evaluate(self.device_of, self.priority, self.is_strict)
        self.is_shown = True
        self._number()

    def snapshot(self) -> Snapshot:
        """The present plan, to come back to."""
        return Snapshot(self.device_of.copy(), self.priority.copy(), self.is_strict, self.score)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a plan."""
        self.device_of, self.priority = snapshot.device_of.copy(), snapshot.priority.copy()
        self.is_strict, self.score = snapshot.is_strict, snapshot.score
        self.is_shown = False

    def result(self) -> Plan:
        """The present plan."""
        order = None
        if self.is_strict:
            sequence = np.lexsort((np.arange(len(self.priority)), self.priority)).astype(np.int32)
            on = self.device_of[sequence]
            num_devices = self.problem.cluster.num_devices
            order = tuple(sequence[on == device] for device in range(num_devices))
        priority = None if self.is_strict else self.priority.copy()
        return self.plan.placing(self.device_of.copy(), priority=priority, by_device=order)

    def _evaluate(self, device_of: IntArray, priority: FloatArray, is_strict: bool) -> Score:
        self.budget -= 1
        return self.evaluator(device_of, priority, is_strict=is_strict)

    def _load_current(self) -> None:
        ops = self.evaluator.runs
        ops.device[:] = self.device_of
        ops.priority[:] = self.priority

    def _take(self) -> None:
        ops = self.evaluator.runs
        self.score = self.evaluator.score
        self.device_of = ops.device.astype(np.int32)
        self.priority = ops.priority.copy()
        self._number()

    def _number(self) -> None:
        """Renumber priorities as whole numbers, so that a fraction always fits between two."""
        sequence = np.argsort(self.priority, kind="stable")
        self.priority[sequence] = np.arange(len(sequence))

    def _number_by_start(self) -> None:
        sequence = np.lexsort((self.evaluator.op_end_s, self.evaluator.op_start_s))
        self.priority = np.empty(len(sequence))
        self.priority[sequence] = np.arange(len(sequence))

    def _table(self, changes: Sequence[Change]) -> Changes:
        sizes = [len(change.ops) for change in changes]
        op = np.concatenate([change.ops for change in changes]).astype(np.int64)
        priority = self.priority[op]
        ptr = pointers(sizes)
        for index, change in enumerate(changes):
            if change.priorities is not None:
                priority[ptr[index] : ptr[index + 1]] = change.priorities
        device = np.concatenate([change.devices for change in changes]).astype(np.int64)
        return changes_of(ptr, op, device, priority)
