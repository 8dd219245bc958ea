"""A plan with its simulated run; ranks plans by overflow, then by step time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate
from hocket.simulate.timeline import Timeline


class Attempt(NamedTuple):
    """A plan and its simulated run."""

    plan: Plan
    timeline: Timeline
    overflow_bytes: int
    """Bytes that devices lack, summed over devices; 0 where the plan fits."""

    def rank(self) -> tuple[int, float]:
        """Sort key: less overflow first, then the shorter step."""
        return self.overflow_bytes, self.timeline.makespan_s


def attempt(problem: Problem, plan: Plan) -> Attempt:
    """Simulate a plan."""
    timeline = simulate(problem, plan)
    lacking = np.maximum(timeline.peak_bytes - problem.memory_bytes, 0)
    return Attempt(plan, timeline, int(lacking.sum()))
