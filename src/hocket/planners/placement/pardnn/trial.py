"""One placement tried in the simulator, in one of two orders: by position or by bottom level."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.arrays import FloatArray, IntArray
from hocket.compiled.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.pardnn.work import Devices, Work
from hocket.simulate.engine import simulate
from hocket.simulate.timeline import Timeline


class Trial(NamedTuple):
    """A placement, the order of its ops and what the simulator says of it."""

    device_of: IntArray
    priority: FloatArray | None
    overflow_bytes: float
    """Bytes that devices need beyond what they have, summed over devices."""
    timeline: Timeline

    @property
    def step_s(self) -> float:
        """Simulated time of the step."""
        return self.timeline.makespan_s


class Trials(NamedTuple):
    """Tries placements of one problem."""

    problem: Problem
    work: Work
    devices: Devices
    is_by_level: bool = False
    """Whether ready ops run by bottom level, the largest first, instead of by position."""

    def __call__(self, device_of: IntArray) -> Trial:
        """Try a placement."""
        priority = self._bottom_level_priority(device_of) if self.is_by_level else None
        timeline = simulate(self.problem, Plan(device_of=device_of, priority=priority))
        excess = timeline.peak_bytes - self.problem.memory_bytes
        return Trial(device_of, priority, float(np.maximum(excess, 0).sum()), timeline)

    def in_other_order(self) -> Trials:
        """The same with the other order."""
        return self._replace(is_by_level=not self.is_by_level)

    def _bottom_level_priority(self, device_of: IntArray) -> FloatArray:
        """Minus the longest path from each op, with op times and transfers of the placement."""
        from hocket.planners.placement.pardnn.levels import bottom_levels

        op_s = self.devices.op_s[device_of, np.arange(len(device_of))]
        bottom_s = np.zeros(len(device_of))
        placed = self.work._replace(op_s=table(op_s, np.float64))
        bottom_levels(placed, device_of.astype(np.int64), bottom_s)
        return -bottom_s


def better(one: Trial, other: Trial) -> Trial:
    """The one with less overflow, then with the shorter step; the first where they are equal."""
    return min(one, other, key=lambda trial: (trial.overflow_bytes, trial.step_s))
