"""Placements tried in the simulator, with ready ops in graph order or by bottom level.

`Trials` simulates a placement in both orders and returns the better one as a `Trial`. On large
graphs only the order that was better the first time is simulated. `faster` and `fitter` compare
trials by step time and by memory overflow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.pardnn.unit_work import Devices, UnitWork
from hocket.planners.shared import is_large
from hocket.simulate.engine import simulate
from hocket.simulate.evaluate import Evaluator, Score
from hocket.simulate.timeline import Timeline


class Trial(NamedTuple):
    """A placement, the order of its ops and its simulated score."""

    device_of: IntArray
    priority: FloatArray | None
    """Minus the bottom level of each op; None for the graph's order."""
    score: Score
    """Memory overflow and step time."""


class Trials(NamedTuple):
    """Simulates placements of one problem."""

    problem: Problem
    work: UnitWork
    devices: Devices
    evaluate: Evaluator
    by_level: tuple[bool, ...] = (False, True)
    """The orders to try: True for the largest bottom level first, False for the graph's order."""

    def __call__(self, device_of: IntArray) -> Trial:
        """Simulate a placement in each of the orders; returns the trial with the shortest step."""
        tried = [self._in_order(device_of, by_level) for by_level in self.by_level]
        return faster(*tried) if len(tried) == 2 else tried[0]

    def narrowed(self, trial: Trial) -> Trials:
        """Return a copy that tries only the order of ``trial``, if the graph is large."""
        if not is_large(len(trial.device_of)):
            return self
        return self._replace(by_level=(trial.priority is not None,))

    def in_any_order(self, trial: Trial) -> Trial:
        """Try a placement in the order left out by `narrowed` as well; returns the faster trial."""
        if len(self.by_level) == 2:
            return trial
        return faster(trial, self._in_order(trial.device_of, not self.by_level[0]))

    def timeline(self, trial: Trial) -> Timeline:
        """Return the simulated timeline of a trial."""
        return simulate(self.problem, Plan().placing(trial.device_of, priority=trial.priority))

    def _in_order(self, device_of: IntArray, by_level: bool) -> Trial:
        priority = self._bottom_level_priority(device_of) if by_level else None
        return Trial(device_of, priority, self.evaluate(device_of, priority))

    def _bottom_level_priority(self, device_of: IntArray) -> FloatArray:
        """Minus the bottom level of each op, with op times and transfers of the placement."""
        from hocket.planners.placement.pardnn.unit_work import bottom_levels

        op_s = self.devices.op_s[device_of, np.arange(len(device_of))]
        placed = self.work._replace(op_s=table(op_s, np.float64))
        return -bottom_levels(placed, device_of.astype(np.int64))


def faster(one: Trial, other: Trial) -> Trial:
    """Return the trial with the shorter step; the first if equal."""
    return other if other.score.step_s < one.score.step_s else one


def fitter(one: Trial, other: Trial) -> Trial:
    """Return the trial with less overflow, then with the shorter step; the first if equal."""
    # The score is overflow, step time, bytes sent; the last must not decide here.
    return other if other.score[:2] < one.score[:2] else one
