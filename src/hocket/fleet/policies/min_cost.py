"""The most steps per second for the price of the devices (OSDI 2020, section 4.2).

Every step counts as one over the price of the device that does it, so that a fast device is used
where it is worth its price. The ratio of all steps to all costs would be best with a single job.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.sums import best_sum


def min_cost(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """The sum of throughputs, each divided by the price of its devices, is largest."""
    return best_sum("min-cost", snapshot, values_per_step(snapshot))


def values_per_step(snapshot: ClusterSnapshot) -> FloatArray:
    """``[job, kind]``: one over the price of a device per hour, by weight."""
    price = snapshot.price_per_hour
    if not np.all(price > 0.0):
        raise UsageError(
            "a policy that minimises cost needs a price for every kind of device",
            hint="give each kind a price per hour above 0",
        )
    return np.asarray(snapshot.weight[:, None] / price[None, :])
