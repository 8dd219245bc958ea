"""All-to-all: the most that every pair of ranks can exchange at once, by linear programming.

Concurrent multicommodity flow with one commodity per source (Shahrokhi and Matula, 1990), solved
by HiGHS. The dual gives a price per channel; rounded to fractions, any prices prove a bound: all
channels together cost price times capacity, and each pair pays at least its cheapest path. So the
bound is exact arithmetic although the solver is not. The flow of each source is taken apart into
paths to the other ranks, widest first (Ford and Fulkerson, 1962), whose shares are fractions again.
O(ranks · links) variables.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.sections.communication import Communication, Tree
from hocket.planners.communication.certificate import Prices
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.paths import Path
from hocket.planners.communication.sends import Edge, sends_of

_DENOMINATOR = 10**6
_SMALL = 1e-7


@dataclass(frozen=True)
class Exchange:
    """Rate of the best all-to-all and the proof of its bound, in units of the fabric."""

    rate: float
    """Rate of the flow that the solver found."""
    certificate: Prices
    flow: FloatArray
    """[source, arc]: flow of each source over each arc."""


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
    crossing = np.maximum(found.x[:-1], 0.0).reshape(count, arcs)
    return Exchange(count * float(-found.fun), Prices(_proven(fabric, price), price), crossing)


def exchange_section(fabric: Fabric, exchange: Exchange) -> Communication:
    """The paths of the flow as a section; ranks on a path forward what is not theirs."""
    count, trees = fabric.num_ranks, []
    for source in range(count):
        left = exchange.flow[source].copy()
        for target in range(count):
            if target == source:
                continue
            paths = list(_paths_of(fabric, left, source, target, exchange.rate / count))
            whole = sum((weight for weight, _ in paths), Fraction(0))
            for weight, path in paths:
                sends = sends_of(fabric, list(_between_ranks(fabric, path)))
                name = fabric.places[source]
                trees.append(Tree(name, weight / whole / count, broadcast=sends))
    ranks = fabric.places[:count]
    return Communication("alltoall", "packed ways", ranks, ranks[0], tuple(trees))


def shortest_exchange(fabric: Fabric) -> Communication:
    """Every pair over one path with the fewest hops, the first of several."""
    count, trees = fabric.num_ranks, []
    for source in range(count):
        by = dict[int, int]()
        reached = [source]
        for place in reached:
            for index in fabric.leaving[place]:
                head = fabric.arcs[index].head
                if head != source and head not in by:
                    by[head] = index
                    reached.append(head)
        for target in range(count):
            if target != source:
                sends = sends_of(fabric, list(_between_ranks(fabric, _path(fabric, by, target))))
                trees.append(Tree(fabric.places[source], Fraction(1, count), broadcast=sends))
    ranks = fabric.places[:count]
    return Communication("alltoall", "shortest ways", ranks, ranks[0], tuple(trees))


def _path(fabric: Fabric, by: Mapping[int, int], target: int) -> Path:
    """The arcs that lead to a place, by the last arc to each."""
    path: list[int] = []
    at = target
    while at in by:
        path.append(by[at])
        at = fabric.arcs[by[at]].tail
    return tuple(reversed(path))


def _paths_of(
    fabric: Fabric, left: FloatArray, source: int, target: int, demand: float
) -> Iterator[tuple[Fraction, Path]]:
    """Paths that together serve the demand, each as wide as the remaining flow allows."""
    wanted = demand
    while wanted > _SMALL * demand:
        path = _widest(fabric, left, source, target)
        width = min((float(left[arc]) for arc in path), default=0.0)
        if width <= _SMALL * demand:
            # What the solver's rounding lost is too little to be found.
            break
        taken = min(width, wanted)
        left[list(path)] -= taken
        wanted -= taken
        yield Fraction(taken / demand).limit_denominator(_DENOMINATOR), path


def _widest(fabric: Fabric, left: FloatArray, source: int, target: int) -> Path:
    """The widest path in the remaining flow (Dijkstra with widths); empty where none is left."""
    width, by = {source: float("inf")}, dict[int, int]()
    heap = [(-width[source], source)]
    while heap:
        wide, place = heapq.heappop(heap)
        if place == target:
            break
        for index in fabric.leaving[place]:
            reached = min(-wide, float(left[index]))
            head = fabric.arcs[index].head
            if head != source and reached > width.get(head, 0.0):
                width[head], by[head] = reached, index
                heapq.heappush(heap, (-reached, head))
    return _path(fabric, by, target)


def _between_ranks(fabric: Fabric, path: Path) -> Iterator[Edge]:
    """Cut a path at each rank that it passes."""
    start, piece = fabric.arcs[path[0]].tail, list[int]()
    for index in path:
        piece.append(index)
        if (head := fabric.arcs[index].head) < fabric.num_ranks:
            yield start, head, tuple(piece)
            start, piece = head, []


def _proven(fabric: Fabric, price: tuple[Fraction, ...]) -> Fraction:
    """Bound that the prices prove: cost of all channels over the least that all pairs pay."""
    total = sum((p * c for p, c in zip(price, fabric.capacity, strict=True)), Fraction(0))
    ranks = range(fabric.num_ranks)
    paid = sum((cost for rank in ranks for cost in _nearest(fabric, price, rank)), Fraction(0))
    return fabric.num_ranks * total / paid


def _nearest(fabric: Fabric, price: tuple[Fraction, ...], start: int) -> list[Fraction]:
    """Costs of the cheapest paths from a rank to all ranks, over any places (Dijkstra)."""
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
