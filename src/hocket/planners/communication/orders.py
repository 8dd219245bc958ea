"""The most Hamiltonian rings or chains that fit on the links at once, as NCCL uses them.

All cycles (or paths) over neighbouring ranks are listed by depth-first search, those that take the
same of every link once; an integer program (HiGHS) picks how often each is used in both directions.
Exact on direct links up to eight ranks or so. Over switches, where any two ranks are neighbours,
only the `MAX_SWITCHED` orders that take the least of the links are picked from.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.plain import are_neighbours
from hocket.planners.communication.ways import Ways

MAX_ORDERS = 4000
MAX_SWITCHED = 200
MAX_VISITS = 200_000
Order = tuple[int, ...]
"""Ranks one after the other; in a ring the first comes after the last."""


def most_orders(fabric: Fabric, ways: Ways, *, is_ring: bool) -> list[tuple[Fraction, Order]]:
    """Orders with whole multiplicities that fit at once; none where there is no such order."""
    distinct: dict[tuple[tuple[int, int], ...], Order] = {}
    for order in _orders(fabric.num_ranks, ways, is_ring):
        distinct.setdefault(_usage(fabric, ways, order, is_ring), order)
        if len(distinct) >= MAX_ORDERS:
            break
    if not distinct:
        return []
    if fabric.has_switches and len(distinct) > MAX_SWITCHED:
        least = sorted(distinct, key=lambda usage: sum(n / fabric.capacity[c] for c, n in usage))
        distinct = {usage: distinct[usage] for usage in least[:MAX_SWITCHED]}
    usages, orders = list(distinct), list(distinct.values())
    counts = _pick(fabric, usages)
    chosen = [(Fraction(n), order) for n, order in zip(counts, orders, strict=True) if n > 0]
    if chosen:
        return chosen
    # No whole unit fits anywhere (a bus that all ranks share): the best one alone, in a fraction.
    rates = [min(Fraction(fabric.capacity[c], times) for c, times in usage) for usage in usages]
    best = rates.index(max(rates))
    return [(rates[best], orders[best])]


def pairs_of(order: Order, *, is_ring: bool) -> list[tuple[int, int]]:
    """Neighbours in an order."""
    pairs = list(itertools.pairwise(order))
    return [*pairs, (order[-1], order[0])] if is_ring else pairs


def _orders(count: int, ways: Ways, is_ring: bool) -> Iterator[Order]:
    """Cycles from rank 0, or paths from each rank, each in one of its two directions."""
    near = [[b for b in range(count) if b != a and are_neighbours(ways, a, b)]
            for a in range(count)]  # fmt: skip
    visits = 0
    for start in range(1 if is_ring else count):
        stack: list[tuple[int, ...]] = [(start,)]
        while stack:
            walk = stack.pop()
            visits += 1
            if visits > MAX_VISITS:
                return
            if len(walk) == count:
                closes = not is_ring or count == 2 or walk[0] in near[walk[-1]]
                forward = walk[1] <= walk[-1] if is_ring else walk[0] < walk[-1]
                if closes and forward:
                    yield walk
                continue
            stack += [(*walk, b) for b in reversed(near[walk[-1]]) if b not in walk]


def _usage(fabric: Fabric, ways: Ways, order: Order, is_ring: bool) -> tuple[tuple[int, int], ...]:
    """What one order takes of each channel, used in both directions."""
    taken: Counter[int] = Counter()
    for a, b in pairs_of(order, is_ring=is_ring):
        for tail, head in ((a, b), (b, a)):
            taken.update(fabric.arcs[arc].channel for arc in ways.path(tail, head))
    return tuple(sorted(taken.items()))


def _pick(fabric: Fabric, usages: list[tuple[tuple[int, int], ...]]) -> list[int]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    entries = [(c, j, times) for j, usage in enumerate(usages) for c, times in usage]
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(fabric.capacity), len(usages)))
    found = milp(
        -np.ones(len(usages)),
        integrality=np.ones(len(usages)),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(matrix.tocsr(), ub=np.array(fabric.capacity, dtype=float)),
        options={"time_limit": 5.0},
    )
    return [round(x) for x in found.x] if found.x is not None else [0] * len(usages)
