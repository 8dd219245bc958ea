"""State of a local search: current plan, score, evaluations left, and the units that move.

`LocalSearch` evaluates changes of the current plan in the simulator and accepts those that improve
the score. `SearchUnits` are sets of ops that move together, and `Change` is one move of ops to
other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers, spans
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.devices import runnable
from hocket.planners.order.levels import latest_starts, levels
from hocket.planners.shared import OpGroups, groups_of
from hocket.simulate.evaluate import Changes, Evaluator, Score, changes_of


@dataclass(frozen=True, eq=False)
class SearchUnits:
    """Sets of ops that move together, and the devices that can run each of them."""

    groups: OpGroups
    can_run: BoolArray
    """[device, unit]: True if the device can run every op of the unit."""

    @property
    def unit_of(self) -> LongArray:
        """Per op: its unit."""
        return self.groups.of

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.groups.ptr) - 1

    def ops_of(self, unit: int) -> LongArray:
        """Ops of a unit."""
        return self.groups.ops[self.groups.ptr[unit] : self.groups.ptr[unit + 1]]

    def ops_of_all(self, units: IntArray | LongArray) -> tuple[LongArray, LongArray]:
        """Ops of several units, and for each op the position of its unit in ``units``."""
        index, position = spans(self.groups.ptr, units)
        return self.groups.ops[index], position


def units_of(problem: Problem, unit_of: IntArray) -> SearchUnits:
    """Build the units from the unit of each op, numbered densely."""
    return SearchUnits(groups_of(unit_of), runnable(problem, unit_of))


NO_SLACK = 1e-9
"""Fraction of the step below which slack counts as rounding."""


@dataclass(frozen=True)
class Change:
    """Ops with a new device each and, if given, new priorities."""

    ops: LongArray
    devices: LongArray
    priorities: FloatArray | None = None


class LocalSearch:
    """Accepts changes that improve the score, within a budget of evaluations."""

    def __init__(self, problem: Problem, plan: Plan, budget: int) -> None:
        assert plan.device_of is not None, "the search starts from a placement"
        self.problem, self.plan, self.budget = problem, plan, budget
        self.evaluator = Evaluator(problem)
        self.score = self.evaluator.plan(plan)
        self.device_of: IntArray = np.array(plan.device_of, dtype=np.int32)
        self.priority: FloatArray = self.evaluator.runs.priority.copy()
        self.is_strict = plan.by_device is not None
        # A strict order is searched as priorities: the positions of ops by start time.
        if self.is_strict:
            self._number_by_start()
        self.is_shown = True
        """True if the evaluator holds the results of the current plan."""

    def show(self) -> None:
        """Evaluate the current plan, unless the evaluator holds its results already."""
        if not self.is_shown:
            self.score = self._evaluate(self.device_of, self.priority, self.is_strict)
            self.is_shown = True

    def first_better(self, changes: Sequence[Change]) -> int:
        """Accept the first change that improves the score; returns its position, or -1."""
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
        """Apply annealing moves, which may worsen the score; keep the best plan found.

        During the walk and in its result, device orders are not strict. If no plan is better than
        the current one, the current plan stays.
        """
        self._load_current()
        self.budget -= len(changes.tolerance)
        score, device_of, priority = self.evaluator.walk(changes, self.score)
        # The evaluator now holds the walk's last plan, which is rarely the best one.
        self.is_shown = False
        if score < self.score:
            self.score, self.device_of, self.priority = score, device_of, priority
            self.is_strict = False
            self._number()

    def try_order(self, priority: FloatArray) -> bool:
        """Accept priorities for the current placement if they improve the score; True if so."""
        if self.budget <= 0:
            return False
        score = self._evaluate(self.device_of, priority, is_strict=False)
        self.is_shown = score < self.score
        if self.is_shown:
            self.priority, self.is_strict = priority.copy(), False
            self.score = score
        return self.is_shown

    def try_fresh_order(self) -> None:
        """Try bottom levels as priorities; if they do not improve the score, latest starts.

        A latest start is how late an op could start in the current step; unlike bottom levels it
        includes the time that transfers wait for each other.
        """
        if not self.try_order(-levels(self.problem, self.device_of).to_end_s):
            self.try_latest_starts()

    def try_latest_starts(self) -> None:
        """Accept latest starts as priorities if they improve the score."""
        self.show()
        self.try_order(latest_starts(self.evaluator, keeps_order=False))

    def result(self) -> Plan:
        """Return the current plan."""
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
        """Renumber priorities as integers, so that a fraction always fits between two."""
        sequence = np.argsort(self.priority, kind="stable")
        self.priority[sequence] = np.arange(len(sequence))

    def _number_by_start(self) -> None:
        sequence = np.lexsort((self.evaluator.op_end_s, self.evaluator.op_start_s))
        self.priority = np.empty(len(sequence))
        self.priority[sequence] = np.arange(len(sequence))

    def _table(self, changes: Sequence[Change]) -> Changes:
        op = np.concatenate([change.ops for change in changes]).astype(np.int64)
        device = np.concatenate([change.devices for change in changes]).astype(np.int64)
        ptr, priority = pointers([len(change.ops) for change in changes]), self.priority[op]
        for index, change in enumerate(changes):
            if change.priorities is not None:
                priority[ptr[index] : ptr[index + 1]] = change.priorities
        return changes_of(ptr, op, device, priority)
