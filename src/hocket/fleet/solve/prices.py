"""The highest level at which all demands can be served, by prices of devices.

At prices p every job serves its demand as cheaply as it can, so a level is out of reach where the
bill exceeds what all devices together cost (duality of linear programs). The level falls to where
the bill of the best prices is exactly that, the prices are searched again there, and both stop when
the purchases fit: then the level is reached and proven. Prices of an earlier moment are good first
questions. O(classes x columns) per question or a few times that, tens of questions when cold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.allocation import Warm
from hocket.fleet.solve.levels import DemandAt
from hocket.fleet.solve.price_tables import JobClassTable, PriceSearch, new_search

MAX_FALLS = 60
"""Times that a level is lowered; a handful in practice."""
# Prices that one search may ask for.
MAX_QUESTIONS = 400
TOLERANCE = 1e-12
# Steps of a root search.
_MAX_STEPS = 300
FREE = 1e-11
"""Price below which a pool counts as free."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Duals:
    """Dual values in units of the level."""

    worth: FloatArray
    """``[class]``: of the progress of one job."""
    rent: FloatArray
    """``[class]``: of the time of one job."""
    price: FloatArray
    """``[pool]``: of one device."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairTime:
    """Time of classes in pairs on shared devices, and the progress that one job makes in it."""

    class_a: LongArray
    class_b: LongArray
    column: LongArray
    amount: FloatArray
    progress: FloatArray
    """``[class]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelAnswer:
    """The highest level that all demands reach together, with shares and proof."""

    level: float
    demand: FloatArray
    shares: FloatArray
    """``[class, column]``: of one job."""
    cap: FloatArray
    """``[class]``: what each class can still rise to when the others keep theirs."""
    warm: Warm
    ceiling: float
    """A level that is proven to be no lower than the best."""
    duals: Duals
    pairs: PairTime | None = None
    """Time of two jobs on a device, where they may share."""


def highest_level(
    job_classes: JobClassTable, demand_at: DemandAt, cap: FloatArray, warm: Warm | None
) -> LevelAnswer:
    """Find the highest level that the devices allow, without sharing."""
    from hocket.fleet.solve.kernel import find_bill

    search = new_search(job_classes, MAX_QUESTIONS)
    num_known = _first_questions(search, len(job_classes.capacity), warm)
    top = top_level(demand_at, cap)
    hint = warm.level if warm is not None and 0.0 < warm.level < top else 0.0
    level, asked = _find_level(job_classes, demand_at, search, (top, hint), num_known)
    demand, slope = search.demand, np.zeros(len(cap))
    find_bill(job_classes, demand, search, search.best, slope)
    is_top = level >= top
    return LevelAnswer(
        level=level,
        demand=demand,
        shares=_shares(job_classes, search, asked),
        duals=_duals(job_classes, search.best, slope),
        cap=demand.copy() if is_top else _free_caps(job_classes, demand, cap, search.best, slope),
        ceiling=level,
        warm=Warm(prices=search.prices[:asked][search.weight[:asked] > 0], level=level),
    )


def _find_level(
    job_classes: JobClassTable,
    demand_at: DemandAt,
    search: PriceSearch,
    start: tuple[float, float],
    num_known: int,
) -> tuple[float, int]:
    """The highest level and the number of questions asked at it; ``start`` is the top level and a
    first guess."""
    from hocket.fleet.solve.kernel import find_bill, find_load

    best, slope = search.prices[0].copy(), np.zeros(len(job_classes.gang))

    def excess(level: float) -> float:
        # The bill may stay at 1 while jobs rise on free devices; the highest such level is wanted.
        return (
            float(find_bill(job_classes, demand_at(level), search, best, slope)) - 1.0 - TOLERANCE
        )

    level, asked = _fall(excess, *start)[0], 0
    for turn in range(MAX_FALLS):
        search.demand[:] = demand_at(level)
        asked, load, bill = find_load(job_classes, search.demand, search, num_known, TOLERANCE)
        is_done = load <= 1.0 + 4.0 * TOLERANCE or bill <= 1.0 + TOLERANCE
        if is_done or turn == MAX_FALLS - 1:
            break
        best[:] = search.best
        lower = _fall(excess, level, level / bill)[0]
        if lower >= level:
            break
        num_known, level = _keep_mixed(search, asked), lower
    return level, asked


def kernels_are_compiled() -> bool:
    """True if the kernels of the price search are compiled already."""
    from hocket.fleet.solve.kernel import find_bill, find_load, mix_purchases
    from hocket.kernels import is_compiled

    return is_compiled(find_bill, find_load, mix_purchases)


def _first_questions(search: PriceSearch, num_pools: int, warm: Warm | None) -> int:
    search.prices[0] = 1.0 / num_pools
    if warm is None or warm.prices.shape[1] != num_pools:
        return 1
    # The remaining questions are for the new search.
    known = warm.prices[: MAX_QUESTIONS // 4]
    search.prices[: len(known)] = known
    return max(len(known), 1)


def _keep_mixed(search: PriceSearch, asked: int) -> int:
    """Move the best prices and those in the mix to the front, as known questions of the next
    search."""
    mixed = search.prices[:asked][search.weight[:asked] > 0]
    search.prices[0] = search.best
    search.prices[1 : 1 + len(mixed)] = mixed
    return 1 + len(mixed)


def _free_caps(
    job_classes: JobClassTable,
    demand: FloatArray,
    cap: FloatArray,
    prices: FloatArray,
    slope: FloatArray,
) -> FloatArray:
    """Caps of classes for the next level: a class that must pay for more stays, others rise on
    pools without a price."""
    is_free = prices <= FREE
    on_free = np.where(is_free, job_classes.rates, 0.0).max(axis=1, initial=0.0)
    rising = np.minimum(cap, np.maximum(on_free, demand))
    # A job that runs all the time on its fastest column has no slope, and cannot rise either.
    slope = np.where(np.isfinite(slope), slope, 0.0)
    costs = slope * demand * job_classes.num_jobs > FREE / max(1, len(demand))
    return np.where(costs, demand, rising)


def _duals(job_classes: JobClassTable, prices: FloatArray, slope: FloatArray) -> Duals:
    price = prices / job_classes.capacity
    worth = np.where(np.isfinite(slope), slope, 0.0)
    margin = worth[:, None] * job_classes.rates - job_classes.gang[:, None] * price[None, :]
    return Duals(worth=worth, rent=np.maximum(margin.max(axis=1, initial=0.0), 0.0), price=price)


def _shares(job_classes: JobClassTable, search: PriceSearch, asked: int) -> FloatArray:
    from hocket.fleet.solve.kernel import mix_purchases

    shares = np.zeros(job_classes.rates.shape)
    mix_purchases(job_classes, search, asked, shares)
    used = (job_classes.gang * job_classes.num_jobs) @ shares
    load = used / job_classes.capacity
    times = shares.sum(axis=1)
    return np.asarray(shares / max(1.0, float(load.max()), float(times.max(initial=0.0))))


# ── levels ───────────────────────────────────────────────────────────────────────────────────────


def top_level(demand_at: DemandAt, cap: FloatArray) -> float:
    """A level at which every class is at its cap."""
    level = max(float(cap.max(initial=0.0)), 1e-300)
    # Demands of finish-time fairness reach their caps at levels far above the largest cap.
    while np.any(demand_at(level) < cap) and level < 1e300:
        level *= 4.0
    return level


def _fall(excess: Callable[[float], float], high: float, hint: float) -> tuple[float, float]:
    """Bracket the zero of ``excess`` below ``high`` by two adjacent levels, or return ``high``
    twice if there is none. The search starts near ``hint``, unless that is 0."""
    over = excess(high)
    if over <= 0.0:
        return high, high
    low = hint if 0.0 < hint < high else high / 2.0
    under = excess(low)
    while under > 0.0:
        high, over = low, under
        low /= 2.0
        under = excess(low)
        if low < 1e-300:
            return 0.0, high
    return root(excess, low, under, high, over)


def proven_level(
    job_classes: JobClassTable, demand_at: DemandAt, duals: Duals, top: float
) -> float:
    """A level that no allocation reaches: demands there are worth more than all time and devices.

    Holds for duals at which no column earns more than its rent and devices cost, however the search
    for the lowest such level ended.
    """
    worth = job_classes.num_jobs * duals.worth
    all_there_is = float(job_classes.num_jobs @ duals.rent + job_classes.capacity @ duals.price)
    # Demands may be worth as much over a range of levels; the highest of them is wanted.
    most = max(all_there_is, 1e-300) * (1.0 + TOLERANCE)
    return _fall(lambda level: float(worth @ demand_at(level)) / most - 1.0, top, 0.0)[1]


def root(
    function: Callable[[float], float], low: float, under: float, high: float, over: float
) -> tuple[float, float]:
    """Bracket the zero of a rising function between ``low`` and ``high`` by two adjacent numbers
    (Illinois method, bisection where that is slow): the last place where it is at most 0, and the
    first where it is not."""
    kept, width = 0, 2.0 * (high - low)
    for turn in range(_MAX_STEPS):
        if high - low <= 1e-15 * high:
            break
        middle = low - under * (high - low) / (over - under)
        is_slow = False
        # Every third step checks that the bracket has shrunk to a quarter at least; otherwise it is
        # bisected.
        if turn % 3 == 2:
            is_slow, width = high - low > 0.25 * width, high - low
        if is_slow or not low < middle < high:
            middle = 0.5 * (low + high)
        value = function(middle)
        # If one end stays twice, its value is halved; otherwise it might never move.
        if value > 0.0:
            under = 0.5 * under if kept < 0 else under
            high, over, kept = middle, value, -1
        else:
            over = 0.5 * over if kept > 0 else over
            low, under, kept = middle, value, 1
        if abs(value) <= 1e-14:
            # Close enough, unless the function is flat there: then the end of the flat part is
            # wanted.
            beside = middle * (1.0 - 1e-13 if value > 0.0 else 1.0 + 1e-13)
            if low < beside < high and (function(beside) > 0.0) == (value <= 0.0):
                return min(middle, beside), max(middle, beside)
    return low, high
