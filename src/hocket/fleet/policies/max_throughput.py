"""The most steps per second in total, by weight (OSDI 2020, section 4.2)."""

from __future__ import annotations

import numpy as np

from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.sums import best_sum


def max_throughput(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """The weighted sum of all throughputs is largest."""
    step_value = np.broadcast_to(snapshot.weight[:, None], snapshot.steps_per_s.shape)
    return best_sum("max-throughput", snapshot, step_value)
