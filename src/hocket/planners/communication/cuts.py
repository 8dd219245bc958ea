"""Bounds by cuts: broadcast (Edmonds, 1973) and all-gather, in exact fractions.

Broadcast: what reaches the worst rank is a maximum flow from the root, and as many trees exist.
All-gather: a set of places that leaves out a rank must export the share of each of its ranks, so
the rate per rank is at most (what leaves) / (ranks inside), minimal over all such sets. Newton's
method on that ratio: a maximum flow from a source that feeds x into every rank either reaches all
ranks in full, or its cut gives a smaller x. A rank's flow is computed about once, so N + few flows;
every x is the ratio of an explicit cut. Reductions have the bounds of the fabric turned around.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.communication.certificate import LinkCut
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import UNLIMITED, FedGraph, fed_graph, max_flow


def broadcast_bound(fabric: Fabric, root: int) -> LinkCut:
    """Return the minimum over ranks of the maximum flow from the root, as a cut."""
    fed = fed_graph(fabric.matrix, fabric.num_ranks)
    best, side = UNLIMITED, np.zeros(0, dtype=np.int64)
    for rank in range(fabric.num_ranks):
        if rank == root:
            continue
        capacity = fed.capacity.copy()
        flow = max_flow(fed.graph, capacity, root, rank, best)
        if flow < best:
            best = int(flow)
            # Had the flow met its limit, the levels would not mark a cut: search on from here.
            max_flow(fed.graph, capacity, root, rank, UNLIMITED)
            side = _source_side(fed)
    return _cut(fabric, Fraction(best), side)


def best_root(fabric: Fabric) -> int:
    """Return the rank from which a broadcast is fastest; the first one of equals."""
    bounds = [broadcast_bound(fabric, rank).bound for rank in range(fabric.num_ranks)]
    return bounds.index(max(bounds))


def gather_bound(fabric: Fabric) -> LinkCut:
    """Return the minimum over cuts of (capacity that leaves) / (ranks inside), times all ranks."""
    matrix, num_ranks = fabric.matrix, fabric.num_ranks
    fed = fed_graph(matrix, num_ranks)
    incoming = matrix.sum(axis=0)[:num_ranks]
    worst = int(np.argmin(incoming))
    side = np.delete(np.arange(fabric.num_places), worst)
    rate = Fraction(int(incoming[worst]), num_ranks - 1)
    waiting = list(range(num_ranks))
    while waiting:
        capacity = fed.capacity * rate.denominator
        capacity[fed.feed] = rate.numerator
        needed = num_ranks * rate.numerator
        if max_flow(fed.graph, capacity, fabric.num_places, waiting[-1], needed) >= needed:
            # A smaller rate later needs no less of these cuts: a rank that passed has passed.
            waiting.pop()
            continue
        side = _source_side(fed)
        rate = Fraction(_crossing(matrix, side), int((side < num_ranks).sum()))
    return _cut(fabric, num_ranks * rate, side)


def _source_side(fed: FedGraph) -> LongArray:
    """Return the places on the source side of the last flow's minimum cut, without the feeding
    node."""
    return np.flatnonzero(fed.graph.level[:-1] >= 0)


def _crossing(matrix: LongArray, side: LongArray) -> int:
    """Return the capacity from the places of ``side`` to the others, in units."""
    inside = np.isin(np.arange(len(matrix)), side)
    return int(matrix[inside][:, ~inside].sum())


def _cut(fabric: Fabric, bound: Fraction, side: LongArray) -> LinkCut:
    names = tuple(fabric.places[place] for place in side.tolist())
    return LinkCut(bound, names, _crossing(fabric.matrix, side))
