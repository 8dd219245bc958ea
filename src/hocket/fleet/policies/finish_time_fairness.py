"""Finish-time fairness: no job ends much later than on an equal part of the cluster.

Mahajan et al., "Themis", NSDI 2020; in the form of OSDI 2020, section 4.2: minimise the largest
rho_m = (e_m + r_m / thr_m) / D_m, D_m being the same time on an equal part. One over rho is a level
at which the demand of a job is 1 / (D_m rho - e_m) of its remaining steps.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.normalise import isolated_steps_per_s, known_remaining_steps, per_unit
from hocket.fleet.solve.levels import DemandAt, LevelProblem, level_demand
from hocket.fleet.solve.water_filling import climb


def finish_time_fairness(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Minimise the largest ratio of finish time to finish time on an equal part."""
    remaining = _cautious(snapshot, known_remaining_steps(snapshot, "finish-time-fairness"))
    isolated = isolated_steps_per_s(snapshot)
    alone_s = snapshot.isolated_s + remaining / np.where(isolated > 0.0, isolated, np.inf)
    alone_s = np.maximum(alone_s, 1e-9)
    rates = per_unit(snapshot.usable_steps_per_s, remaining)

    def largest_ratio(progress: FloatArray) -> float:
        with np.errstate(divide="ignore"):
            ratio = (snapshot.elapsed_s + 1.0 / progress) / alone_s
        return float(ratio[np.isfinite(progress)].max(initial=0.0))

    marks = np.stack([alone_s, snapshot.elapsed_s], axis=1)
    level_problem = LevelProblem(
        rates=rates, marks=marks, demands=_demands, score=largest_ratio, is_cost=True
    )
    return climb("finish-time-fairness", snapshot, level_problem, warm)


def _cautious(snapshot: ClusterSnapshot, remaining: FloatArray) -> FloatArray:
    """Remaining steps; an overdue job counts as long as the longest job that is not.

    Otherwise its waiting time would weigh more than that of jobs with honest claims.
    """
    fastest = np.maximum(snapshot.usable_steps_per_s.max(axis=1, initial=0.0), 1e-300)
    longest_s = (remaining / fastest).max(initial=0.0, where=snapshot.keeps_word)
    return np.where(snapshot.keeps_word, remaining, np.maximum(remaining, longest_s * fastest))


def _demands(marks: FloatArray, num_jobs: FloatArray, cap: FloatArray) -> DemandAt:
    alone_s, elapsed_s = marks[:, 0], marks[:, 1]
    # A job that is too late for this level runs as fast as it can.
    return level_demand(cap, pace=1.0 / alone_s, drag=elapsed_s / alone_s)
