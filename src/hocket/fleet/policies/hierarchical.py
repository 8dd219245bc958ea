"""Teams share the cluster by weight; inside a team jobs share fairly, or in order of arrival.

OSDI 2020, section 4.3 (water filling). The budget of a team rises with the level, by its weight.
Fair: all jobs of a team rise together, by weight, and the part of a job that cannot rise goes to
its siblings. First come, first served: the earliest job takes its team's whole budget until its
speed cannot grow. In both cases the demand at a level has a closed form.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.normalise import per_unit, proportional_steps_per_s
from hocket.fleet.solve.levels import DemandAt, Demands, LevelProblem, level_demand
from hocket.fleet.solve.water_filling import climb

# Columns of the marks of a job.
_TEAM, _TEAM_WEIGHT, _WEIGHT, _GANG, _ARRIVAL = range(5)


def hierarchical(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Teams by weight, fair inside."""
    marks = _marks(snapshot)
    marks[:, _ARRIVAL] = 0.0
    return _climb("hierarchical", snapshot, marks, _fair_demands, warm)


def hierarchical_fifo(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Teams by weight, first come, first served inside."""
    return _climb("hierarchical-fifo", snapshot, _marks(snapshot), _queue_demands, warm)


def _marks(snapshot: ClusterSnapshot) -> FloatArray:
    team_weight = snapshot.team_weight[snapshot.team_of]
    columns = [snapshot.team_of, team_weight, snapshot.weight, snapshot.gang, snapshot.arrival]
    return np.stack(columns, axis=1).astype(float)


def _climb(
    name: str, snapshot: ClusterSnapshot, marks: FloatArray, demands: Demands, warm: Warm | None
) -> Allocation:
    rates = per_unit(snapshot.usable_steps_per_s, proportional_steps_per_s(snapshot))
    return climb(name, snapshot, LevelProblem(rates=rates, marks=marks, demands=demands), warm)


def _fair_demands(marks: FloatArray, num_jobs: FloatArray, cap: FloatArray) -> DemandAt:
    teams, team = np.unique(marks[:, _TEAM], return_inverse=True)
    weight = marks[:, _WEIGHT] * num_jobs
    stop = cap * marks[:, _GANG] / marks[:, _WEIGHT]
    spent = _spent_until_each_stop(team, weight, stop) / marks[:, _TEAM_WEIGHT]
    team_weight = np.zeros(len(teams))
    team_weight[team] = marks[:, _TEAM_WEIGHT]

    def demand_at(level: float) -> FloatArray:
        has_stopped = spent <= level
        taken = np.bincount(team, np.where(has_stopped, weight * stop, 0.0), len(teams))
        rising = np.bincount(team, np.where(has_stopped, 0.0, weight), len(teams))
        height = (team_weight * level - taken) / np.where(rising > 0.0, rising, np.inf)
        due = height[team] * marks[:, _WEIGHT] / marks[:, _GANG]
        return np.where(has_stopped, cap, np.clip(due, 0.0, cap))

    return demand_at


def _spent_until_each_stop(
    team: NDArray[np.int64], weight: FloatArray, stop: FloatArray
) -> FloatArray:
    """Budget that a team has spent when each of its classes reaches its cap: the sum of w min(stop,
    .)."""
    order = np.lexsort((stop, team))
    ordered, is_first = team[order], np.ones(len(team), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    start = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    weights, stops = weight[order], stop[order]
    before, products = np.cumsum(weights) - weights, np.cumsum(weights * stops)
    total = np.bincount(team, weight)[ordered]
    stopped = products - (products - weights * stops)[start]
    rising = total - (before - before[start]) - weights
    spent = np.empty(len(team))
    spent[order] = stopped + stops * rising
    return spent


def _queue_demands(marks: FloatArray, num_jobs: FloatArray, cap: FloatArray) -> DemandAt:
    order = np.lexsort((marks[:, _ARRIVAL], marks[:, _TEAM]))
    pace = marks[:, _TEAM_WEIGHT] / (marks[:, _GANG] * num_jobs)
    length = (cap / pace)[order]
    team, end = marks[order, _TEAM], np.cumsum(length)
    is_first = np.ones(len(team), dtype=bool)
    is_first[1:] = team[1:] != team[:-1]
    begin = end - length
    start = np.empty(len(team))
    start[order] = begin - begin[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    return level_demand(cap, pace, start)
