"""Makespan: the last job ends as early as possible.

OSDI 2020, section 4.2: minimise the largest r_m / thr_m. One over the makespan is a level at which
the demand of every job is its remaining steps, so no bisection is needed.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.normalise import known_remaining_steps, per_unit
from hocket.fleet.solve.levels import LevelProblem
from hocket.fleet.solve.water_filling import climb


def makespan(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Minimise the time until all jobs have ended, in seconds."""
    remaining = known_remaining_steps(snapshot, "makespan")
    rates = per_unit(snapshot.usable_steps_per_s, remaining)
    marks = np.empty((len(rates), 0))
    level_problem = LevelProblem(rates=rates, marks=marks, score=_longest_s, is_cost=True)
    return climb("makespan", snapshot, level_problem, warm)


def _longest_s(progress: FloatArray) -> float:
    lowest = float(progress.min(initial=np.inf))
    return 1.0 / lowest if lowest > 0.0 else np.inf
