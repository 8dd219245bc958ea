"""The most steps per second in total, by weight (OSDI 2020, section 4.2)."""

from __future__ import annotations

import numpy as np

from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.market import Market
from hocket.fleet.solve.sums import best_sum


def max_throughput(market: Market, warm: Warm | None = None) -> Allocation:
    """The weighted sum of all throughputs is largest."""
    step_value = np.broadcast_to(market.weight[:, None], market.steps_per_s.shape)
    return best_sum("max-throughput", market, step_value)
