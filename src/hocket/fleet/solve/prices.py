"""The highest level at which all demands can be served, by prices of devices.

At prices p every job serves its demand as cheaply as it can, so a level is out of reach where the
bill exceeds what all devices together cost (duality of linear programs). The level falls to where
the bill of the best prices is exactly that, the prices are searched again there, and both stop when
the purchases fit: then the level is reached and proven. Prices of an earlier moment are good first
questions. O(classes x columns^2) per question, some tens of questions from a cold start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.fleet.allocation import Warm
from hocket.fleet.solve.crowd import Crowd, Search, new_search
from hocket.fleet.solve.ladder import DemandAt

Counts = NDArray[np.int64]

MAX_QUESTIONS = 400
MAX_DESCENTS = 60
TOLERANCE = 1e-12
_FREE = 1e-11
"""Price below which a pool costs nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Duals:
    """What a little more of everything is worth, in levels."""

    worth: FloatArray
    """``[class]``: of the progress of one job."""
    rent: FloatArray
    """``[class]``: of the time of one job."""
    price: FloatArray
    """``[pool]``: of one device."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairTime:
    """Time that classes spend two on a device, and the progress that one job makes in it."""

    class_a: Counts
    class_b: Counts
    column: Counts
    amount: FloatArray
    progress: FloatArray
    """``[class]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rung:
    """The highest level that all demands reach together."""

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
    """What jobs do two on a device, where they may share."""
    served: float = 1.0
    """The least part that a class makes of what it is owed; 1 but for many classes that share."""


def highest_rung(crowd: Crowd, demand_at: DemandAt, cap: FloatArray, warm: Warm | None) -> Rung:
    """Climb as high as the devices allow."""
    search = new_search(crowd, MAX_QUESTIONS)
    slope, price = np.zeros(len(cap)), np.zeros(len(crowd.pool_of))
    best = np.zeros(len(crowd.capacity))
    num_known = _first_questions(search, len(crowd.capacity), warm)

    from hocket.fleet.solve.kernel import find_bill, find_load

    def excess(level: float) -> float:
        # A bill may stay at 1 while jobs rise for nothing: the end of that is looked for.
        return float(find_bill(crowd, demand_at(level), best, price, slope)) - 1.0 - TOLERANCE

    best[:] = search.prices[0]
    level, is_top = _drop(excess, top_level(demand_at, cap), warm)
    asked = 0
    for _ in range(MAX_DESCENTS):
        asked, load, bill = find_load(crowd, demand_at(level), search, num_known, TOLERANCE)
        if load <= 1.0 + 4.0 * TOLERANCE or bill <= 1.0 + TOLERANCE:
            break
        best[:] = search.best
        lower, _ = _drop(excess, level, None)
        num_known, is_top = _keep_active(search, asked, best), False
        if lower >= level:
            break
        level = lower
    demand, best[:] = demand_at(level), search.best
    excess(level)
    new_cap = demand.copy() if is_top else _free_caps(crowd, demand, cap, search.best, slope)
    return Rung(
        level=level,
        demand=demand,
        shares=_shares(crowd, demand, search, asked),
        duals=_duals(crowd, search.best, slope),
        cap=new_cap,
        ceiling=level,
        warm=Warm(prices=search.prices[:asked][search.weight[:asked] > 0], level=level),
    )


def kernels_are_compiled() -> bool:
    """Whether the next search starts at once instead of compiling first."""
    from hocket.compiled.jit import is_compiled
    from hocket.fleet.solve.kernel import find_bill, find_load, mix_purchases

    return all(map(is_compiled, (find_bill, find_load, mix_purchases)))


def _first_questions(search: Search, num_pools: int, warm: Warm | None) -> int:
    search.prices[0] = 1.0 / num_pools
    if warm is None or warm.prices.shape[1] != num_pools:
        return 1
    known = warm.prices[: MAX_QUESTIONS // 4]
    search.prices[: len(known)] = known
    return max(len(known), 1)


def _keep_active(search: Search, asked: int, best: FloatArray) -> int:
    """Move the prices that the mix consists of, and the best, to the front as known questions."""
    active = search.prices[:asked][search.weight[:asked] > 0]
    search.prices[0] = best
    search.prices[1 : 1 + len(active)] = active
    return 1 + len(active)


def _free_caps(
    crowd: Crowd, demand: FloatArray, cap: FloatArray, prices: FloatArray, slope: FloatArray
) -> FloatArray:
    """Who must pay for more cannot rise; the others can, as far as pools without a price allow."""
    is_free = prices[crowd.pool_of] <= _FREE
    on_free = np.where(is_free, crowd.rates, 0.0).max(axis=1, initial=0.0)
    rising = np.minimum(cap, np.maximum(on_free, demand))
    # A job that runs all the time on its fastest column has no slope, and no way up either.
    slope = np.where(np.isfinite(slope), slope, 0.0)
    costs = slope * demand * crowd.num_jobs > _FREE / max(1, len(demand))
    return np.where(costs, demand, rising)


def _duals(crowd: Crowd, prices: FloatArray, slope: FloatArray) -> Duals:
    price = prices / crowd.capacity
    worth = np.where(np.isfinite(slope), slope, 0.0)
    margin = worth[:, None] * crowd.rates - crowd.gang[:, None] * price[crowd.pool_of][None, :]
    return Duals(worth=worth, rent=np.maximum(margin.max(axis=1, initial=0.0), 0.0), price=price)


def _shares(crowd: Crowd, demand: FloatArray, search: Search, asked: int) -> FloatArray:
    from hocket.fleet.solve.kernel import mix_purchases

    shares = np.zeros(crowd.rates.shape)
    mix_purchases(crowd, demand, search, asked, shares)
    used = (crowd.gang * crowd.num_jobs) @ shares
    load = np.bincount(crowd.pool_of, used, len(crowd.capacity)) / crowd.capacity
    times = shares.sum(axis=1)
    return np.asarray(shares / max(1.0, float(load.max()), float(times.max(initial=0.0))))


# ── levels ───────────────────────────────────────────────────────────────────────────────────────


def top_level(demand_at: DemandAt, cap: FloatArray) -> float:
    """A level at which everybody is as high as it can be."""
    level = max(float(cap.max(initial=0.0)), 1e-300)
    while np.any(demand_at(level) < cap) and level < 1e300:
        level *= 4.0
    return level


def _drop(excess: Callable[[float], float], high: float, warm: Warm | None) -> tuple[float, bool]:
    """The level up to ``high`` where the excess is 0, and whether it is ``high`` itself."""
    over = excess(high)
    if over <= 0.0:
        return high, True
    has_hint = warm is not None and 0.0 < warm.level < high
    low = warm.level if warm is not None and has_hint else high / 2.0
    under = excess(low)
    while under > 0.0:
        high, over = low, under
        low /= 2.0
        under = excess(low)
        if low < 1e-300:
            return 0.0, False
    return root(excess, low, under, high, over), False


def level_of_zero(excess: Callable[[float], float], high: float) -> float:
    """The level up to ``high`` where a rising excess is 0."""
    return _drop(excess, high, None)[0]


def root(
    function: Callable[[float], float], low: float, under: float, high: float, over: float
) -> float:
    """Where a rising function is 0 between two places (method of Illinois; O(log) evaluations)."""
    kept = 0
    for _ in range(100):
        if high - low <= 1e-15 * high:
            break
        middle = low - under * (high - low) / (over - under)
        if not low < middle < high:
            middle = 0.5 * (low + high)
        value = function(middle)
        if abs(value) <= 1e-14:
            return middle
        # An end that stays twice counts half, or it would stay for ever.
        if value > 0.0:
            under = 0.5 * under if kept < 0 else under
            high, over, kept = middle, value, -1
        else:
            over = 0.5 * over if kept > 0 else over
            low, under, kept = middle, value, 1
    return low
