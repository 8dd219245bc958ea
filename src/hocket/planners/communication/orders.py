"""The most Hamiltonian rings or chains that fit on the links at once, as NCCL uses them.

All cycles (or paths) over neighbouring ranks are listed by depth-first search, those that take the
same of every link once. How often each is used in both directions is an integer program. Its linear
relaxation bounds the count; a greedy choice that reaches this bound is optimal, and only where it
does not, HiGHS solves the program. Exact on direct links up to eight ranks or so. Over switches,
where any two ranks are neighbours, only the `MAX_SWITCHED` orders that take the least of the links
are candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.paths import NEVER, CheapestPaths

MAX_ORDERS = 4000
MAX_SWITCHED = 200
MAX_STEPS = 120_000
"""Most steps of the depth-first search: enough for all chains of eight fully connected ranks."""
MAX_REPEATS = 5000
"""Stop after this number of consecutive orders over switches that use links as an earlier one
does."""
_BATCH = 1024
_ROUNDING = 1e-6
"""Tolerance when the LP optimum is rounded down to whole orders."""
Order = tuple[int, ...]
"""Ranks in sequence; in a ring the first follows the last."""


def most_orders(
    fabric: Fabric, paths: CheapestPaths, *, is_ring: bool
) -> list[tuple[Fraction, Order]]:
    """Return orders with whole multiplicities that fit at once; empty if there is no such order."""
    orders, usage = _distinct_orders(fabric, paths, is_ring)
    if not orders:
        return []
    capacity = np.array(fabric.capacity, dtype=np.int64)
    if fabric.has_switches and len(orders) > MAX_SWITCHED:
        least = np.argsort(usage @ (1 / capacity), kind="stable")[:MAX_SWITCHED]
        orders, usage = [orders[index] for index in least], usage[least]
    counts = _most_at_once(usage, capacity)
    chosen = [(Fraction(int(n)), order) for n, order in zip(counts, orders, strict=True) if n > 0]
    if chosen:
        return chosen
    # No whole unit fits anywhere (a bus that all ranks share): the best one alone, in a fraction.
    rates = [
        min(Fraction(int(units), int(n)) for units, n in zip(capacity, row, strict=True) if n)
        for row in usage
    ]
    best = rates.index(max(rates))
    return [(rates[best], orders[best])]


def are_neighbours(paths: CheapestPaths, a: int, b: int) -> bool:
    """True if two ranks reach each other without a third rank."""
    return bool(paths.cost[a][b] < NEVER and paths.cost[b][a] < NEVER)


def pairs_of(order: Order, *, is_ring: bool) -> list[tuple[int, int]]:
    """Return the pairs of neighbours in an order."""
    pairs = list(itertools.pairwise(order))
    return [*pairs, (order[-1], order[0])] if is_ring else pairs


def _orders(count: int, paths: CheapestPaths, is_ring: bool) -> Iterator[Order]:
    """Cycles from rank 0, or paths from each rank, each in one of its two directions."""
    near = [[b for b in range(count) if b != a and are_neighbours(paths, a, b)]
            for a in range(count)]  # fmt: skip
    steps = 0
    for start in range(1 if is_ring else count):
        stack: list[tuple[int, ...]] = [(start,)]
        while stack:
            walk = stack.pop()
            steps += 1
            if steps > MAX_STEPS:
                return
            if len(walk) == count:
                closes = not is_ring or count == 2 or walk[0] in near[walk[-1]]
                forward = walk[1] <= walk[-1] if is_ring else walk[0] < walk[-1]
                if closes and forward:
                    yield walk
                continue
            stack += [(*walk, b) for b in reversed(near[walk[-1]]) if b not in walk]


def _distinct_orders(
    fabric: Fabric, paths: CheapestPaths, is_ring: bool
) -> tuple[list[Order], LongArray]:
    """Orders that differ in their use of the links, and [order, channel] how often each is used."""
    used_by = np.zeros((fabric.num_ranks, fabric.num_ranks, len(fabric.capacity)), dtype=np.int64)
    for a, b in itertools.permutations(range(fabric.num_ranks), 2):
        if are_neighbours(paths, a, b):
            channels = [fabric.arcs[arc].channel for arc in (*paths.path(a, b), *paths.path(b, a))]
            np.add.at(used_by[a, b], channels, 1)
    found: dict[bytes, tuple[Order, LongArray]] = {}
    repeats = 0
    listed = _orders(fabric.num_ranks, paths, is_ring)
    while batch := list(itertools.islice(listed, _BATCH)):
        ranks = np.array(batch)
        following = np.roll(ranks, -1, axis=1) if is_ring else ranks[:, 1:]
        usage = used_by[ranks[:, : following.shape[1]], following].sum(axis=1)
        known = len(found)
        for order, row in zip(batch, usage, strict=True):
            found.setdefault(row.tobytes(), (order, row))
        repeats = 0 if len(found) > known else repeats + len(batch)
        if len(found) >= MAX_ORDERS or (fabric.has_switches and repeats > MAX_REPEATS):
            break
    orders = [order for order, _ in found.values()]
    return orders, np.array([row for _, row in found.values()], dtype=np.int64)


def _most_at_once(usage: LongArray, capacity: LongArray) -> LongArray:
    """Return the weight of each order that maximises the total that fits at once."""
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp
    from scipy.sparse import csr_array

    gain = -np.ones(len(usage))
    matrix = csr_array(usage.T)
    relaxed = linprog(gain, A_ub=matrix, b_ub=capacity, method="highs")
    counts = _greedy(usage, capacity)
    if relaxed.success and counts.sum() >= np.floor(_ROUNDING - relaxed.fun):
        return counts
    exact = milp(
        gain,
        integrality=np.ones(len(usage)),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(matrix, ub=capacity.astype(float)),
        options={"time_limit": 5.0},
    )
    return counts if exact.x is None else np.rint(exact.x).astype(np.int64)


def _greedy(usage: LongArray, capacity: LongArray) -> LongArray:
    """Repeatedly choose the order that needs the least of the remaining capacity."""
    left = capacity.copy()
    counts = np.zeros(len(usage), dtype=np.int64)
    fitting = np.flatnonzero((usage <= left).all(axis=1))
    while len(fitting):
        take = fitting[np.argmin(usage[fitting] @ (1 / np.maximum(left, 1)))]
        left -= usage[take]
        counts[take] += 1
        fitting = fitting[(usage[fitting] <= left).all(axis=1)]
    return counts
