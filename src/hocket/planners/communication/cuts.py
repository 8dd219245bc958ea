"""Bounds by cuts: broadcast (Edmonds, 1973) and all-gather, in exact fractions.

Broadcast: what reaches the worst rank is a maximum flow from the root, and as many trees exist.
All-gather: a set of places that leaves out a rank must export the share of each of its ranks, so
the rate per rank is at most (what leaves) / (ranks inside), minimal over all such sets. Newton's
method on that ratio: a maximum flow from a source that feeds x into every rank either reaches all
ranks in full, or its cut gives a smaller x. Reductions are the same on reversed arcs. A rank's flow
is computed about once, so N + few flows; every x is the ratio of an explicit cut.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.communication.certificate import LinkCut
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import UNLIMITED, flow_graph, max_flow


class _Fed:
    """The graph of a fabric with one more node that feeds all ranks."""

    def __init__(self, matrix: LongArray, num_ranks: int) -> None:
        self.num_places = len(matrix)
        self.matrix = matrix
        tails, heads = np.nonzero(np.triu(matrix + matrix.T))
        feeds = np.stack((np.full(num_ranks, self.num_places), np.arange(num_ranks)), axis=1)
        pairs = np.concatenate((np.stack((tails, heads), axis=1), feeds)).astype(np.int64)
        self.graph, place = flow_graph(self.num_places + 1, pairs)
        self.feed = place[len(tails) :]
        self.capacity = np.zeros(len(self.graph.arc_head), dtype=np.int64)
        inner = place[: len(tails)]
        self.capacity[inner] = matrix[tails, heads]
        self.capacity[self.graph.arc_reverse[inner]] = matrix[heads, tails]

    def reached(self) -> LongArray:
        """Places on the source side of the cut that the last flow left."""
        return np.flatnonzero(self.graph.level[: self.num_places] >= 0)


def crossing(matrix: LongArray, side: LongArray) -> int:
    """Units from the places of ``side`` to the others."""
    inside = np.zeros(len(matrix), dtype=np.bool_)
    inside[side] = True
    return int(matrix[inside][:, ~inside].sum())


def broadcast_bound(fabric: Fabric, root: int, *, is_reduce: bool = False) -> LinkCut:
    """The least maximum flow from the root to a rank (from a rank to the root for reduce)."""
    matrix = fabric.matrix.T if is_reduce else fabric.matrix
    fed = _Fed(np.ascontiguousarray(matrix), fabric.num_ranks)
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
            side = fed.reached()
    return LinkCut(Fraction(best), _names(fabric, side), best)


def best_root(fabric: Fabric, *, is_reduce: bool = False) -> int:
    """The rank from which a broadcast is fastest; the first of equals."""
    bounds = [
        broadcast_bound(fabric, rank, is_reduce=is_reduce).bound for rank in range(fabric.num_ranks)
    ]
    return bounds.index(max(bounds))


def gather_bound(fabric: Fabric, *, is_reduce: bool = False) -> LinkCut:
    """The least (what leaves a set of places) / (its ranks), times all ranks."""
    matrix = np.ascontiguousarray(fabric.matrix.T if is_reduce else fabric.matrix)
    num_ranks = fabric.num_ranks
    fed = _Fed(matrix, num_ranks)
    incoming = matrix.sum(axis=0)[:num_ranks]
    worst = int(np.argmin(incoming))
    side = np.delete(np.arange(fabric.num_places), worst)
    rate = Fraction(int(incoming[worst]), num_ranks - 1)
    waiting = list(range(num_ranks))
    while waiting:
        rank = waiting[-1]
        capacity = fed.capacity * rate.denominator
        capacity[fed.feed] = rate.numerator
        needed = num_ranks * rate.numerator
        if max_flow(fed.graph, capacity, fed.num_places, rank, needed) >= needed:
            # A smaller rate later needs no less of these cuts: a rank that passed has passed.
            waiting.pop()
            continue
        side = fed.reached()
        inside = int((side < num_ranks).sum())
        rate = Fraction(crossing(matrix, side), inside)
    return LinkCut(num_ranks * rate, _names(fabric, side), crossing(matrix, side))


def _names(fabric: Fabric, side: LongArray) -> tuple[str, ...]:
    return tuple(fabric.places[place] for place in side.tolist())
