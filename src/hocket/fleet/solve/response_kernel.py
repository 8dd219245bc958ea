"""The compiled part of duals for jobs from those of a few: what each would pay among them.

A job beside a known partner has a device for its price less what the partner's progress is worth
above its rent. At a worth of progress its time earns the most over such offers; the worth at which
that earns as fast as the job needs to run is the worth of its progress, and what the time earns
there its rent: a vertex of a convex hull, found by cutting edges off from both sides. O(partners x
columns) per cut, a handful of cuts per job.
"""

from __future__ import annotations

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.pair_tables import Anchors, ClassPairTable
from hocket.kernels import kernel

_MAX_CUTS = 40
_ABOVE = 1e-12


@kernel
def _best_offer(
    table: ClassPairTable, anchors: Anchors, price: FloatArray, one: int, worth: float
) -> tuple[float, float, float]:
    """Best offer for the time of a job at a worth of progress: earnings, rate, cost."""
    mine, gang = table.profile_of[one], table.gang[one]
    best, rate, cost = 0.0, 0.0, 0.0
    for j in range(price.shape[0]):
        earned = worth * table.alone[one, j] - gang * price[j]
        if table.alone[one, j] > 0.0 and earned > best:
            best, rate, cost = earned, table.alone[one, j], gang * price[j]
    for i in range(anchors.one.shape[0]):
        other = anchors.one[i]
        if table.gang[other] != gang or (other == one and table.num_jobs[one] < 2.0):
            continue
        theirs, value = table.profile_of[other], anchors.value[i]
        for j in range(price.shape[0]):
            ours, beside = table.steps_per_s[mine, theirs, j], table.steps_per_s[theirs, mine, j]
            if ours > 0.0 and beside > 0.0 and table.alone[one, j] > 0.0:
                paid = anchors.spent[i, j] - value * beside
                earned = worth * ours * table.unit[one] - paid
                if earned > best:
                    best, rate, cost = earned, ours * table.unit[one], paid
    return best, rate, cost


@kernel
def respond(
    table: ClassPairTable,
    anchors: Anchors,
    price: FloatArray,
    needed: FloatArray,
    worth: FloatArray,
    rent: FloatArray,
) -> None:
    """Worth and rent of every class that needs to run at some rate, among known partners.

    ``price`` is that of a device of each column.
    """
    for one in range(worth.shape[0]):
        fastest, price_fastest = 0.0, 0.0
        for j in range(price.shape[0]):
            if table.alone[one, j] > fastest:
                fastest, price_fastest = table.alone[one, j], table.gang[one] * price[j]
        worth[one], rent[one] = 0.0, 0.0
        if fastest <= 0.0 or needed[one] <= 0.0:
            continue
        enough = min(needed[one], fastest)
        low_rate, low_cost, high_rate, high_cost = 0.0, 0.0, fastest, price_fastest
        for _ in range(_MAX_CUTS):
            # A partner may be so glad of the company that progress costs nothing.
            at = max((high_cost - low_cost) / (high_rate - low_rate), 0.0)
            best, rate, cost = _best_offer(table, anchors, price, one, at)
            worth[one], rent[one] = at, best
            if best <= at * low_rate - low_cost + _ABOVE * (at * high_rate):
                break
            if rate >= enough:
                high_rate, high_cost = rate, cost
            else:
                low_rate, low_cost = rate, cost
