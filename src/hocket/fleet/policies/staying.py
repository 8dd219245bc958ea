"""Jobs that a policy leaves where its last answer put them, as long as there are devices."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.market import Market


def staying_on(market: Market) -> LongArray:
    """The kind on which each job had all its time and stays; -1 for none.

    Where devices have become fewer, those stay that came first.
    """
    stays_on = np.full(market.num_jobs, -1)
    if market.last_shares is None:
        return stays_on
    had_all = (market.last_shares >= 1.0) & (market.usable_steps_per_s > 0.0)
    free = market.num_devices.astype(np.int64)
    by_arrival = np.argsort(market.arrival, kind="stable")
    for job in by_arrival[had_all[by_arrival].any(axis=1)].tolist():
        kind = int(np.argmax(had_all[job]))
        if market.gang[job] <= free[kind]:
            free[kind] -= market.gang[job]
            stays_on[job] = kind
    return stays_on
