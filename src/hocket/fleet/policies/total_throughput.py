"""The largest weighted sum of throughputs, and the same per price of the devices.

OSDI 2020, section 4.2. Under `min-cost` a step counts as one over the price of its device, so a
fast device is used where it is worth its price. The ratio of all steps to all costs is not used as
objective: it would be best with a single job.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.sums import best_sum


def max_throughput(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Make the weighted sum of all throughputs largest."""
    step_value = np.broadcast_to(snapshot.weight[:, None], snapshot.steps_per_s.shape)
    return best_sum("max-throughput", snapshot, step_value)


def min_cost(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Make the sum of throughputs, each divided by the price of its devices, largest."""
    return best_sum("min-cost", snapshot, values_per_step(snapshot))


def values_per_step(snapshot: ClusterSnapshot) -> FloatArray:
    """``[job, type]``: one over the price of a device per hour, by weight."""
    price = snapshot.price_per_hour
    if not np.all(price > 0.0):
        raise UsageError(
            "a policy that minimises cost needs a price for every device type",
            hint="give each device type a price per hour above 0",
        )
    return np.asarray(snapshot.weight[:, None] / price[None, :])
