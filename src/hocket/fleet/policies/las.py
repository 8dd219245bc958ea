"""Max-min fairness (least attained service) that knows how fast each job is on each device type.

Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads",
OSDI 2020, section 4.1: maximise the lowest s_m thr_m / (w_m T_m), T_m being the throughput on a
proportional mix of all devices. Ties are broken by maximising the next lowest, and so on.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.normalise import per_unit, proportional_steps_per_s
from hocket.fleet.solve.levels import LevelProblem
from hocket.fleet.solve.water_filling import climb


def las(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Maximise the lowest normalised throughput, by weight and per device of the gang."""
    return climb("las", snapshot, las_level_problem(snapshot), warm)


def las_level_problem(snapshot: ClusterSnapshot) -> LevelProblem:
    """Level problem of LAS; it depends on throughputs, gangs and weights only."""
    rates = per_unit(snapshot.usable_steps_per_s, _due(snapshot))
    return LevelProblem(rates=rates, marks=np.empty((len(rates), 0)), score=lowest)


def _due(snapshot: ClusterSnapshot) -> FloatArray:
    return np.asarray(snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang)


def lowest(progress: FloatArray) -> float:
    """The lowest progress of all jobs."""
    return float(progress.min(initial=np.inf))
