"""One level of max-min fairness, from the prices of the last answer to who can rise further.

What `solve.prices.highest_level` does for demands in closed form, as one call: rounds ask for
shares at every change, and calls from Python would take most of the time. O(classes x columns) per
price that is asked.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.rounds.tables import Ascent
from hocket.fleet.solve.kernel import find_bill, mix_purchases
from hocket.fleet.solve.level_kernel import find_level
from hocket.fleet.solve.price_tables import JobClassTable, LevelDemand, PriceSearch
from hocket.fleet.solve.prices import FREE, TOLERANCE
from hocket.fleet.solve.water_filling import NOT_HIGHER, ROOM
from hocket.kernels import kernel


@kernel
def climb(
    job_classes: JobClassTable,
    level_demand: LevelDemand,
    top: float,
    hint: float,
    num_known: int,
    ascent: Ascent,
) -> tuple[float, int, int]:
    """The highest level; ``ascent`` has its prices, weights, shares, and the caps from there.

    The first ``num_known`` prices are given. Returns the level, the number of prices asked, and how
    many classes can rise further. Shares are those of the last level: there nobody can.
    """
    num_pools = job_classes.capacity.shape[0]
    search = PriceSearch(
        ascent.questions[0],
        ascent.questions[1],
        ascent.weight,
        ascent.inverse,
        ascent.basis,
        ascent.by_pool[0, :num_pools],
        ascent.by_pool[1, :num_pools],
        ascent.by_pool[2, :num_pools],
        ascent.by_pool[3, : num_pools + 1],
        ascent.by_pool[4, : num_pools + 1],
        ascent.by_class[0],
        ascent.bought[0],
        ascent.bought[1],
    )
    for one in range(search.low.shape[0]):
        search.low[one] = -1
        search.high[one] = -1
    level, num_asked = find_level(
        job_classes, level_demand, search, (top, hint), num_known, TOLERANCE
    )
    slope = ascent.by_class[1]
    find_bill(job_classes, search.demand, search, search.best, slope)
    num_rising = _set_caps(
        job_classes, level_demand, search, slope, level >= top, ascent.by_class[2]
    )
    ascent.shares[:, :] = 0.0
    mix_purchases(job_classes, search, num_asked, ascent.shares)
    return level, num_asked, num_rising


@kernel
def _set_caps(
    job_classes: JobClassTable,
    level_demand: LevelDemand,
    search: PriceSearch,
    slope: FloatArray,
    is_top: bool,
    cap: FloatArray,
) -> int:
    """Who must pay for more keeps what it has, less a hair; the others rise on what is free."""
    num_classes: int = cap.shape[0]
    num_rising = 0
    for one in range(num_classes):
        demand = search.demand[one]
        highest = demand
        # A job that runs all the time on its fastest column has no slope, and no way up either.
        rise = slope[one] if np.isfinite(slope[one]) else 0.0
        is_dear = rise * demand * job_classes.num_jobs[one] > FREE / max(1, num_classes)
        if not is_top and not is_dear:
            on_free = 0.0
            for column in range(job_classes.rates.shape[1]):
                if search.best[column] <= FREE:
                    on_free = max(on_free, job_classes.rates[one, column])
            highest = min(level_demand.cap[one], max(on_free, demand))
        can_rise = highest > demand * (1.0 + NOT_HIGHER)
        num_rising += can_rise
        cap[one] = highest if can_rise else min(demand, highest) * (1.0 - ROOM)
    return num_rising
