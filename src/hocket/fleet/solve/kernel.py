"""The compiled part of the price search: what jobs buy at given prices, and the next prices.

Demands are served with the least load (the share of its devices that the fullest pool needs) when
prices are such that jobs which buy as cheaply as they can fill all priced pools equally. Each
question, "what would you buy at these prices", yields one vector of loads; the mix of vectors with
the least maximum is a linear program with one row per pool, solved by the simplex method, whose
duals are the next prices to ask for. Asking at the midpoint to the best prices so far keeps them
from oscillating. O(classes x columns) per question while purchases stay as they were, as most do,
O(questions x pools + pools^2) per pivot.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.price_tables import JobClassTable, PriceSearch
from hocket.kernels import kernel

_LOAD = -1
"""The variable of the simplex method that stands for the load of the fullest pool."""
# Limits of the simplex method: pivots per question, smallest difference, and smallest pivot.
_MAX_PIVOTS = 200
_TINY = 1e-13
_SMALLEST_PIVOT = 1e-9
_REST = -1
"""In place of a column: no progress, for nothing."""
_MAX_TURNS = 64
"""Of an edge; far more than columns, so only rounding errors could run in circles up to here."""


@kernel
def fastest_column(rates: FloatArray, price: FloatArray, one: int) -> int:
    """The column of the highest rate, the cheapest of equal ones; ``_REST`` if there is none."""
    fastest, most = _REST, 0.0
    for j in range(rates.shape[1]):
        rate = rates[one, j]
        if rate > most or (fastest >= 0 and rate == most and price[j] < price[fastest]):
            fastest, most = j, rate
    return fastest


@kernel
def cheapest(
    rates: FloatArray, price: FloatArray, one: int, demand: float, low: int, high: int
) -> tuple[int, int, float, float]:
    """The cheapest way to meet a demand: two columns, the part of the time on the second, and the
    marginal price.

    It lies on an edge of the lower convex hull of the points (rate, price), idling included as (0,
    0). The edge of the last purchase is turned towards the point furthest below it until there is
    none; mostly it is still the right edge.
    """
    if high < 0 or rates[one, high] < demand:
        high = fastest_column(rates, price, one)
        if high < 0:
            return _REST, _REST, 0.0, np.inf
        if rates[one, high] < demand:
            return _REST, high, 1.0, np.inf
    if low >= 0 and rates[one, low] >= demand:
        low = _REST
    for _ in range(_MAX_TURNS):
        rate_low, price_low = 0.0, 0.0
        if low >= 0:
            rate_low, price_low = rates[one, low], price[low]
        more, rise = rates[one, high] - rate_low, price[high] - price_low
        # Slopes are compared as products: a division per column would take half of the time.
        deepest, lowest = price_low * more - rise * rate_low, _REST
        is_below = deepest > 0.0
        if not is_below:
            deepest = 0.0
        for j in range(rates.shape[1]):
            depth = rise * (rates[one, j] - rate_low) - (price[j] - price_low) * more
            if depth > deepest:
                deepest, lowest, is_below = depth, j, True
        if not is_below:
            break
        if lowest < 0 or rates[one, lowest] < demand:
            low = lowest
        else:
            high = lowest
    rate_low, price_low = 0.0, 0.0
    if low >= 0:
        rate_low, price_low = rates[one, low], price[low]
    more = rates[one, high] - rate_low
    return low, high, (demand - rate_low) / more, (price[high] - price_low) / more


@kernel
def cost_of(price: FloatArray, low: int, high: int, part: float) -> float:
    """Price of a purchase."""
    cost = 0.0
    if low >= 0:
        cost += (1.0 - part) * price[low]
    if high >= 0:
        cost += part * price[high]
    return cost


@kernel
def set_prices(job_classes: JobClassTable, prices: FloatArray, price: FloatArray) -> None:
    """Compute the price of one device of each column."""
    for pool in range(job_classes.capacity.shape[0]):
        price[pool] = prices[pool] / job_classes.capacity[pool]


@kernel
def forget_purchases(search: PriceSearch) -> None:
    """Reset all purchases to the fastest column, so that ties are always broken the same way."""
    for one in range(search.low.shape[0]):
        search.low[one] = _REST
        search.high[one] = _REST


@kernel
def ask(job_classes: JobClassTable, demand: FloatArray, search: PriceSearch, at: int) -> float:
    """Record the loads that all classes cause at ``search.asked`` as question ``at``; returns the
    bill."""
    num_pools = job_classes.capacity.shape[0]
    set_prices(job_classes, search.asked, search.price)
    for pool in range(num_pools):
        search.prices[at, pool] = search.asked[pool]
        search.load[at, pool] = 0.0
    for one in range(demand.shape[0]):
        low, high, part, _ = cheapest(
            job_classes.rates, search.price, one, demand[one], search.low[one], search.high[one]
        )
        search.low[one], search.high[one] = low, high
        devices = job_classes.gang[one] * job_classes.num_jobs[one]
        if low >= 0:
            search.load[at, low] += devices * (1.0 - part)
        if high >= 0:
            search.load[at, high] += devices * part
    bill = 0.0
    for pool in range(num_pools):
        search.load[at, pool] /= job_classes.capacity[pool]
        bill += search.asked[pool] * search.load[at, pool]
    return bill


@kernel
def start_basis(search: PriceSearch, num_pools: int) -> None:
    """Initialise the simplex basis with question 0 alone: the load is that of its fullest pool."""
    fullest = 0
    for pool in range(num_pools):
        if search.load[0, pool] > search.load[0, fullest]:
            fullest = pool
    search.inverse[:, :] = 0.0
    # Rows: one per pool (load of the mix - load + slack = 0), then the weights sum to one.
    for pool in range(num_pools):
        search.basis[pool] = pool
        search.inverse[pool, pool] = 1.0
        search.inverse[pool, fullest] = -1.0
        search.inverse[pool, num_pools] = search.load[0, fullest] - search.load[0, pool]
    search.basis[fullest] = _LOAD
    search.inverse[fullest, :] = 0.0
    search.inverse[fullest, fullest] = -1.0
    search.inverse[fullest, num_pools] = search.load[0, fullest]
    search.basis[num_pools] = num_pools
    search.inverse[num_pools, num_pools] = 1.0


@kernel
def load_row(search: PriceSearch, num_pools: int) -> int:
    """Row of the load variable in the basis; it never leaves."""
    for row in range(num_pools + 1):
        if search.basis[row] == _LOAD:
            return row
    return 0


@kernel
def pick_entering(search: PriceSearch, num_pools: int, num_asked: int, row: int) -> int:
    """The variable that lowers the load fastest when it enters, or ``_LOAD`` if none does."""
    chosen, steepest = _LOAD, -_TINY * max(1.0, abs(search.inverse[row, num_pools]))
    for pool in range(num_pools):
        if -search.inverse[row, pool] < steepest:
            chosen, steepest = pool, -search.inverse[row, pool]
    for question in range(num_asked):
        cost = -search.inverse[row, num_pools]
        for pool in range(num_pools):
            cost -= search.inverse[row, pool] * search.load[question, pool]
        if cost < steepest:
            chosen, steepest = num_pools + question, cost
    return chosen


@kernel
def pivot(search: PriceSearch, num_pools: int, entering: int, load_at: int) -> bool:
    """Bring a variable into the basis; returns False if none can leave for it."""
    rows = num_pools + 1
    search.entering[:] = 0.0
    if entering < num_pools:
        search.entering[entering] = 1.0
    else:
        search.entering[num_pools] = 1.0
        for pool in range(num_pools):
            search.entering[pool] = search.load[entering - num_pools, pool]
    leaving, shortest = -1, np.inf
    for row in range(rows):
        step = 0.0
        for k in range(rows):
            step += search.inverse[row, k] * search.entering[k]
        search.step[row] = step
        if row != load_at and step > _SMALLEST_PIVOT:
            length = max(search.inverse[row, num_pools], 0.0) / step
            # Of ties, the largest pivot is taken, because it adds the smallest error to the
            # inverse. Then the variable with the lowest index is taken, so that the method cannot
            # cycle.
            is_tie = leaving >= 0 and abs(length - shortest) <= _TINY
            is_larger = is_tie and step > 2.0 * search.step[leaving]
            is_alike = is_tie and step > 0.5 * search.step[leaving]
            is_lower = is_alike and search.basis[row] < search.basis[leaving]
            if length < shortest - _TINY or is_larger or is_lower:
                leaving, shortest = row, length
    if leaving < 0:
        return False
    for k in range(rows):
        search.inverse[leaving, k] /= search.step[leaving]
    for row in range(rows):
        if row != leaving:
            for k in range(rows):
                search.inverse[row, k] -= search.step[row] * search.inverse[leaving, k]
    search.basis[leaving] = entering
    return True


@kernel
def settle(search: PriceSearch, num_pools: int, num_asked: int) -> tuple[float, int]:
    """Pivot until the mix of questions has the least load; returns that load and the number of
    pivots."""
    row = load_row(search, num_pools)
    num_pivots = 0
    while num_pivots < _MAX_PIVOTS:
        entering = pick_entering(search, num_pools, num_asked, row)
        if entering == _LOAD or not pivot(search, num_pools, entering, row):
            break
        num_pivots += 1
    return float(search.inverse[row, num_pools]), num_pivots


@kernel
def propose(search: PriceSearch, num_pools: int, caution: float) -> None:
    """Set the next prices: the duals of the mix, moved towards the best prices by ``caution``."""
    row = load_row(search, num_pools)
    total = 0.0
    for pool in range(num_pools):
        search.asked[pool] = max(-search.inverse[row, pool], 0.0)
        total += search.asked[pool]
    for pool in range(num_pools):
        dual = search.asked[pool] / total
        search.asked[pool] = caution * search.best[pool] + (1.0 - caution) * dual


@kernel
def read_weights(search: PriceSearch, num_pools: int, num_asked: int) -> None:
    """Compute the weight of each question in the mix."""
    search.weight[:num_asked] = 0.0
    total = 0.0
    for row in range(num_pools + 1):
        if search.basis[row] >= num_pools:
            weight = max(search.inverse[row, num_pools], 0.0)
            search.weight[search.basis[row] - num_pools] = weight
            total += weight
    # Rounding errors add up over many pivots, so the weights are normalised to sum to 1.
    for question in range(num_asked):
        search.weight[question] /= total


@kernel
def find_load(
    job_classes: JobClassTable,
    demand: FloatArray,
    search: PriceSearch,
    num_known: int,
    tolerance: float,
) -> tuple[int, float, float]:
    """Find the prices with the highest bill by cutting planes; the first ``num_known`` questions
    are given.

    Returns the number of questions, the load of the mix, and the highest bill, which is a lower
    bound on the load. Stops when the two meet, or when both exceed 1 so far that the demands are
    certainly too high. With ties between throughputs, an answer may change the mix without lowering
    the load. The next question is then the duals themselves, and the search ends when their answer
    changes nothing.
    """
    num_pools, max_asked = job_classes.capacity.shape[0], search.prices.shape[0]
    highest, num_asked = -1.0, 0
    caution = 0.0
    load = np.inf
    is_stalled = False
    forget_purchases(search)
    while num_asked < max_asked:
        if num_asked < num_known:
            for pool in range(num_pools):
                search.asked[pool] = search.prices[num_asked, pool]
        else:
            propose(search, num_pools, 0.0 if is_stalled else caution)
        bill = ask(job_classes, demand, search, num_asked)
        if bill > highest:
            highest = bill
            for pool in range(num_pools):
                search.best[pool] = search.asked[pool]
        num_asked += 1
        if num_asked < num_known:
            continue
        if num_asked == num_known:
            start_basis(search, num_pools)
            caution = 0.5
            load, _ = settle(search, num_pools, num_asked)
        else:
            before = load
            load, num_pivots = settle(search, num_pools, num_asked)
            if is_stalled and num_pivots == 0:
                break
            is_stalled = load >= before - tolerance
        gap = load - highest
        if gap <= tolerance or gap < 0.1 * (highest - 1.0 - tolerance):
            break
    read_weights(search, num_pools, num_asked)
    return num_asked, load, highest


@kernel
def find_bill(
    job_classes: JobClassTable,
    demand: FloatArray,
    search: PriceSearch,
    prices: FloatArray,
    slope: FloatArray,
) -> float:
    """Price of serving the demands at given prices; ``slope`` is set to the marginal price of each
    class."""
    price = search.price
    set_prices(job_classes, prices, price)
    bill = 0.0
    for one in range(demand.shape[0]):
        low, high, part, rise = cheapest(
            job_classes.rates, price, one, demand[one], search.low[one], search.high[one]
        )
        search.low[one], search.high[one] = low, high
        slope[one] = job_classes.gang[one] * rise
        bill += job_classes.gang[one] * job_classes.num_jobs[one] * cost_of(price, low, high, part)
    return bill


@kernel
def mix_purchases(
    job_classes: JobClassTable, search: PriceSearch, num_asked: int, shares: FloatArray
) -> None:
    """Average the purchases of all questions by weight into ``shares``.

    All questions are asked again in order, because ties at equal prices are broken by the last
    purchase.
    """
    forget_purchases(search)
    for question in range(num_asked):
        weight = search.weight[question]
        set_prices(job_classes, search.prices[question], search.price)
        for one in range(search.demand.shape[0]):
            low, high, part, _ = cheapest(
                job_classes.rates,
                search.price,
                one,
                search.demand[one],
                search.low[one],
                search.high[one],
            )
            search.low[one], search.high[one] = low, high
            if low >= 0:
                shares[one, low] += weight * (1.0 - part)
            if high >= 0:
                shares[one, high] += weight * part
