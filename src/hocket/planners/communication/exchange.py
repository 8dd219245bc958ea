"""All-to-all: the most that every pair of ranks can exchange at once, by linear programming.

Concurrent multicommodity flow with one commodity per source (Shahrokhi and Matula, 1990), solved
by HiGHS. The dual gives a price per channel; rounded to fractions, any prices prove a bound: all
channels cost together what they can carry, and each pair pays at least its cheapest way. So the
bound is exact arithmetic although the solver is not. O(ranks · links) variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.planners.communication.certificate import Prices
from hocket.planners.communication.fabric import Fabric

_DENOMINATOR = 10**6


@dataclass(frozen=True)
class Exchange:
    """What an all-to-all can reach, and why not more, in units of the fabric."""

    rate: float
    """Of the flow that the solver found."""
    certificate: Prices


def exchange_bound(fabric: Fabric) -> Exchange:
    """The rate of the best all-to-all and prices that bound it."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    count, arcs, places = fabric.num_ranks, len(fabric.arcs), fabric.num_places
    rows, columns, values = [], [], []
    for source in range(count):
        for index, arc in enumerate(fabric.arcs):
            column = source * arcs + index
            rows += [source * places + arc.tail, source * places + arc.head]
            columns += [column, column]
            values += [1.0, -1.0]
        for rank in range(count):
            rows.append(source * places + rank)
            columns.append(count * arcs)
            values.append(1.0 if rank != source else -(count - 1.0))
    shape = (count * places, count * arcs + 1)
    flow = coo_array((values, (rows, columns)), shape=shape).tocsr()
    channel = [arc.channel for arc in fabric.arcs] * count
    load = coo_array(
        (np.ones(count * arcs), (channel, np.arange(count * arcs))),
        shape=(len(fabric.capacity), count * arcs + 1),
    ).tocsr()
    gain = np.zeros(count * arcs + 1)
    gain[-1] = -1.0
    found = linprog(
        gain, A_eq=flow, b_eq=np.zeros(count * places), A_ub=load,
        b_ub=np.array(fabric.capacity, dtype=float), method="highs",
    )  # fmt: skip
    if found.x is None:
        raise NoFeasiblePlanError(f"the exchange could not be solved: {found.message}")
    price = tuple(
        Fraction(max(0.0, -float(y))).limit_denominator(_DENOMINATOR)
        for y in found.ineqlin.marginals
    )
    return Exchange(count * float(-found.fun), Prices(_proven(fabric, price), price))


def _proven(fabric: Fabric, price: tuple[Fraction, ...]) -> Fraction:
    """What all channels cost, over what all pairs pay at least (times the ranks)."""
    total = sum((p * c for p, c in zip(price, fabric.capacity, strict=True)), Fraction(0))
    ranks = range(fabric.num_ranks)
    paid = sum((cost for rank in ranks for cost in _nearest(fabric, price, rank)), Fraction(0))
    return fabric.num_ranks * total / paid


def _nearest(fabric: Fabric, price: tuple[Fraction, ...], start: int) -> list[Fraction]:
    """Cheapest ways from a rank to all ranks, over any places (Dijkstra)."""
    known: dict[int, Fraction] = {}
    open_: dict[int, Fraction] = {start: Fraction(0)}
    while open_:
        place = min(open_, key=lambda p: (open_[p], p))
        known[place] = open_.pop(place)
        for arc in fabric.arcs:
            if arc.tail == place and arc.head not in known:
                cost = known[place] + price[arc.channel]
                if arc.head not in open_ or cost < open_[arc.head]:
                    open_[arc.head] = cost
    return [known[rank] for rank in range(fabric.num_ranks)]
