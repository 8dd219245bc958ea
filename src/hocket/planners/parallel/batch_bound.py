"""Lower bound on the step time over all splits of a batch across devices, from dual prices.

For any prices of the devices' seconds that add up to one, a step is at least as long as the sum of
all ops' costs, each on its cheapest device (duality of the assignment of work to unequal devices).
Passes count with their shortest time per sample over all sizes, updates once; waits and transfers
are ignored. Subgradient steps improve the prices. O(steps x device types x ops).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.graph.graph import Phase
from hocket.planners.bounds import LowerBound
from hocket.planners.parallel.closed_form import Tables
from hocket.simulate.parallel.batch_costs import priced_at

SHARED = "the work of all samples, each op where it is done best"
_STEPS = 60


def batch_bound(tables: Tables, devices: list[int]) -> LowerBound:
    """Lower bound on the step time over all batch splits, pipelines and placements."""
    cheapest = _cheapest_s(tables)
    rows = sorted({tables.row(device) for device in devices})
    counts = np.array([sum(tables.row(d) == row for d in devices) for row in rows])
    seconds = cheapest[rows]
    speed = 1 / np.maximum(seconds.sum(axis=1), 1e-30)
    # Start with prices by speed, under which all devices earn the same per sample.
    price = speed / (speed @ counts)
    best = 0.0
    for step in range(_STEPS):
        cost = price[:, None] * seconds
        choice = cost.argmin(axis=0)
        value = float(cost.min(axis=0).sum())
        best = max(best, value)
        # Seconds of work per device of each type; the price rises where they exceed the others'.
        load = np.array([seconds[row, choice == row].sum() for row in range(len(rows))]) / counts
        mean = max(float(load @ (counts * price)), 1e-30)
        # Prices change less and less; above zero, because multiplying would never raise a zero.
        price = np.maximum(price * (1 + (load / mean - 1) * 0.3 / (1 + step / 8)), 1e-12)
        price /= price @ counts
    # The margin covers rounding, since the bound must never exceed a real step.
    return LowerBound(best * (1 - 1e-9), SHARED, {SHARED: best})


def _cheapest_s(tables: Tables) -> FloatArray:
    """[device type, op]: shortest time for all samples, over all microbatch sizes."""
    problem = tables.problem
    is_update = problem.graph.op_phase == Phase.OPTIMIZER
    least = np.full(problem.costs.op_s.shape, np.inf)
    for size in tables.sizes.tolist():
        per_sample = priced_at(problem, size).costs.op_s / size
        least = np.minimum(least, per_sample)
    found: FloatArray = np.where(is_update, problem.costs.op_s, least * tables.num_samples)
    # A large number instead of infinity, because it is multiplied by prices and sample counts.
    return np.where(np.isfinite(found), found, 1e9)
