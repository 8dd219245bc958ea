"""Heterogeneity-agnostic baselines of OSDI 2020: policies that treat all device types as equal.

Max-min fairness then counts every throughput as 1; where steps have to be counted, every device
type is as fast as the fastest one. The reported objective uses these equal
speeds, not the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.finish_time_fairness import finish_time_fairness
from hocket.fleet.policies.las import las
from hocket.fleet.policies.makespan import makespan

# Note on the objective of these policies.
_SEEN = "as seen by a policy that takes all device types for equal"


def las_agnostic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Max-min fairness of time, wherever it is spent."""
    time = (snapshot.steps_per_s > 0.0).astype(float)
    return _renamed("las-agnostic", las, replace(snapshot, steps_per_s=time, pairs=None), warm)


def ftf_agnostic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Finish-time fairness as if every device type were the fastest."""
    return _renamed("ftf-agnostic", finish_time_fairness, all_fastest(snapshot), warm)


def makespan_agnostic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Makespan as if every device type were the fastest."""
    return _renamed("makespan-agnostic", makespan, all_fastest(snapshot), warm)


def all_fastest(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """The snapshot with every device type as fast as the fastest."""
    fastest = snapshot.steps_per_s.max(axis=1, initial=0.0)[:, None]
    steps_per_s = np.where(snapshot.steps_per_s > 0.0, fastest, 0.0)
    return replace(snapshot, steps_per_s=steps_per_s, pairs=None)


def _renamed(
    name: str,
    policy: Callable[[ClusterSnapshot, Warm | None], Allocation],
    snapshot: ClusterSnapshot,
    warm: Warm | None,
) -> Allocation:
    answer = policy(snapshot, warm)
    return replace(answer, policy=name, notes={**answer.notes, "objective": _SEEN})
