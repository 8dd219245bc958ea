"""The compiled search for the level at which all demands can just be served.

At fixed prices the bill rises with the level, piecewise smoothly and with known slope: Newton's
method finds where it is 1, and falls back on the chord of a bracket, then on its middle, where a
step leaves the bracket or does not halve. Between two such falls the prices are searched again.
O(classes x columns) per bill, about five bills per fall, a handful of falls.
"""

from __future__ import annotations

from hocket.fleet.solve.kernel import cheapest, cost_of, find_load, set_prices
from hocket.fleet.solve.price_tables import MAX_FALLS, JobClassTable, LevelDemand, PriceSearch
from hocket.kernels import kernel

_MAX_STEPS = 100
_CLOSE = 1e-13
"""Steps aim as much below the bill that they look for, so as not to end above it."""


@kernel
def demand_of(level_demand: LevelDemand, one: int, level: float) -> tuple[float, float]:
    """What a class is due at a level, and how fast that rises with it."""
    ahead = max(level - level_demand.start[one], 0.0) * level_demand.pace[one]
    left = 1.0 - level_demand.drag[one] * level
    if not ahead < level_demand.cap[one] * left:
        return level_demand.cap[one], 0.0
    if ahead == 0.0:
        return 0.0, 0.0
    return ahead / left, (level_demand.pace[one] * left + ahead * level_demand.drag[one]) / (
        left * left
    )


@kernel
def bill_at(
    job_classes: JobClassTable, level_demand: LevelDemand, search: PriceSearch, level: float
) -> tuple[float, float]:
    """What a level costs at ``search.price``, and how fast that rises with the level."""
    bill, rise = 0.0, 0.0
    for one in range(job_classes.gang.shape[0]):
        demand, faster = demand_of(level_demand, one, level)
        low, high, part, slope = cheapest(
            job_classes.rates, search.price, one, demand, search.low[one], search.high[one]
        )
        search.low[one], search.high[one] = low, high
        devices = job_classes.gang[one] * job_classes.num_jobs[one]
        bill += devices * cost_of(search.price, low, high, part)
        if faster > 0.0:
            rise += devices * slope * faster
    return bill, rise


@kernel
def fall(
    job_classes: JobClassTable,
    level_demand: LevelDemand,
    search: PriceSearch,
    high: float,
    hint: float,
    allowed: float,
) -> float:
    """The level up to ``high`` that costs ``allowed`` at the best prices.

    Looked for first at ``hint``, unless that is 0.
    """
    set_prices(job_classes, search.best, search.price)
    bill, rise = bill_at(job_classes, level_demand, search, high)
    over = bill - allowed
    if over <= 0.0:
        return high
    low, under, at, value = 0.0, -allowed, high, over
    step = before = 2.0 * high
    was_chord = False
    for turn in range(_MAX_STEPS):
        next_at = hint if turn == 0 and hint > 0.0 else at - (value + _CLOSE) / rise
        is_good = low < next_at < high and abs(next_at - at) <= 0.5 * before
        if not is_good:
            next_at = low - under * (high - low) / (over - under)
            if low == 0.0:
                # Far above everybody's cap the bill hardly falls.
                next_at = min(next_at, 0.25 * high)
            elif was_chord or not low < next_at < high:
                next_at = 0.5 * (low + high)
        was_chord = not is_good and not was_chord
        before, step = step, abs(next_at - at)
        at = next_at
        bill, rise = bill_at(job_classes, level_demand, search, at)
        value = bill - allowed
        if value > 0.0:
            high, over = at, value
        else:
            low, under = at, value
        if -2.0 * _CLOSE <= value <= 0.0 or high - low <= 1e-15 * high:
            break
    return low


@kernel
def keep_mixed(search: PriceSearch, num_asked: int, num_pools: int) -> int:
    """Move the best prices, and those that the mix consists of, to the front as known questions."""
    kept = 0
    for question in range(num_asked):
        if search.weight[question] > 0.0:
            for pool in range(num_pools):
                search.prices[kept, pool] = search.prices[question, pool]
            kept += 1
    for pool in range(num_pools):
        search.prices[kept, pool] = search.prices[0, pool]
        search.prices[0, pool] = search.best[pool]
    return kept + 1


@kernel
def find_level(
    job_classes: JobClassTable,
    level_demand: LevelDemand,
    search: PriceSearch,
    start: tuple[float, float],
    num_known: int,
    tolerance: float,
) -> tuple[float, int]:
    """The highest level that the devices allow, from ``start``: the top and a first guess.

    Returns the level and the number of questions asked at it.
    """
    num_pools = job_classes.capacity.shape[0]
    allowed = 1.0 + tolerance
    for pool in range(num_pools):
        search.best[pool] = search.prices[0, pool]
    level, num_asked = fall(job_classes, level_demand, search, start[0], start[1], allowed), 0
    for turn in range(MAX_FALLS):
        for one in range(search.demand.shape[0]):
            search.demand[one] = demand_of(level_demand, one, level)[0]
        num_asked, load, bill = find_load(job_classes, search.demand, search, num_known, tolerance)
        if load <= 1.0 + 4.0 * tolerance or bill <= allowed or turn == MAX_FALLS - 1:
            break
        lower = fall(job_classes, level_demand, search, level, 0.0, allowed)
        if lower >= level:
            break
        num_known = keep_mixed(search, num_asked, num_pools)
        level = lower
    return level, num_asked
