"""Max-min fairness as Gavel's solver answers it, for rounds that do as Gavel does.

The lowest job is as high as with `las`, but the others are left wherever an interior-point method
passed them (`fleet.solve.centre`): a job of one device that cannot run any faster stops the level
for gangs too, which need little time to reach it. O(classes x kinds^3) per step of the solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.las import las_level_problem, lowest
from hocket.fleet.solve.centre import central_shares


def las_central(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Every job is due the same, and nobody is raised beyond the lowest on purpose."""
    rates = las_level_problem(snapshot).rates
    can_run = rates.any(axis=1)
    shares, bound = np.zeros(rates.shape), 0.0
    if can_run.any():
        keys = np.column_stack([rates, snapshot.gang])[can_run]
        classes, of, num_jobs = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        is_there = snapshot.num_devices > 0
        central, bound = central_shares(
            classes[:, :-1][:, is_there], classes[:, -1], snapshot.num_devices[is_there], num_jobs
        )
        shares[np.ix_(can_run, is_there)] = central[of.ravel()]
    progress = (rates * shares).sum(axis=1)[can_run]
    return Allocation(policy="las", shares=shares, objective=lowest(progress), bound=bound)


def las_central_agnostic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """The same for time, wherever it is spent."""
    time = (snapshot.steps_per_s > 0.0).astype(float)
    answer = las_central(replace(snapshot, steps_per_s=time, pairs=None))
    return replace(answer, policy="las-agnostic")


CENTRAL: dict[str, Callable[[ClusterSnapshot, Warm | None], Allocation]] = {
    "las": las_central,
    "las-agnostic": las_central_agnostic,
}
"""By the policy whose lowest job they have."""
