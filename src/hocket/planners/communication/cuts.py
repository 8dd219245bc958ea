"""Bounds of collectives by cuts (broadcast: Edmonds, 1973; all-gather), and their certificates.

Broadcast: the rate to the worst rank is a maximum flow from the root, and as many trees exist.
All-gather: a set of places that leaves out a rank must export the shard of each of its ranks, so
the rate per rank is at most (capacity that leaves) / (ranks inside), minimal over all such sets.
Newton's method on that ratio: a maximum flow from a source that feeds x into every rank either
reaches all ranks in full, or its cut gives a smaller x. Each rank's flow is computed about once, so
slightly more than N maximum flows are needed. Every x is the ratio of a cut that was found, which
certifies the bound. Reductions have the bounds of the reversed fabric.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import UNLIMITED, FedGraph, fed_graph, max_flow

# Certificates of bounds: a cut through the links, or dual prices of the channels.
#
# Each states the bound as algorithm bandwidth (bytes of the full message per second, in units of
# the fabric) together with its proof. The tests verify every certificate independently, from the
# links alone (`tests/planners/certificate_checker.py`).


@dataclass(frozen=True)
class LinkCut:
    """A cut: all data that leaves ``side`` (enters it, for reductions) crosses the cut's links."""

    bound: Fraction
    side: tuple[str, ...]
    crossing: int
    """Capacity from the side to the other places, in units of the fabric."""

    def to_data(self) -> dict[str, Any]:
        """Return the certificate in the form of plan files and ``--json``."""
        return {
            "kind": "cut",
            "bound": str(self.bound),
            "side": list(self.side),
            "crossing": self.crossing,
        }


@dataclass(frozen=True)
class Prices:
    """Dual prices of channels under which any schedule costs at least 1 per unit of the collective.

    The total capacity costs ``bound``, so no schedule moves more units.
    """

    bound: Fraction
    """Sum over channels of price times capacity."""
    price: tuple[Fraction, ...]
    """Price of each channel of the fabric."""

    def to_data(self) -> dict[str, Any]:
        """Return the certificate in the form of plan files and ``--json``."""
        return {
            "kind": "prices",
            "bound": str(self.bound),
            "price": [str(price) for price in self.price],
        }


Certificate = LinkCut | Prices


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
            # A flow that stopped at its limit leaves levels that mark no cut, so it is computed in
            # full.
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
    # Start with the cut around the rank with the least incoming capacity.
    side = np.delete(np.arange(fabric.num_places), worst)
    rate = Fraction(int(incoming[worst]), num_ranks - 1)
    waiting = list(range(num_ranks))
    while waiting:
        capacity = fed.capacity * rate.denominator
        capacity[fed.feed] = rate.numerator
        needed = num_ranks * rate.numerator
        if max_flow(fed.graph, capacity, fabric.num_places, waiting[-1], needed) >= needed:
            # Rates only fall, and a smaller rate needs less, so a rank that has passed need not be
            # repeated.
            waiting.pop()
            continue
        side = _source_side(fed)
        rate = Fraction(_crossing(matrix, side), int((side < num_ranks).sum()))
    return _cut(fabric, num_ranks * rate, side)


def _source_side(fed: FedGraph) -> LongArray:
    """Return the places on the source side of the last flow's minimum cut, without the feeding
    node."""
    # The last node is the one that feeds the ranks.
    return np.flatnonzero(fed.graph.level[:-1] >= 0)


def _crossing(matrix: LongArray, side: LongArray) -> int:
    """Return the capacity from the places of ``side`` to the others, in units."""
    inside = np.isin(np.arange(len(matrix)), side)
    return int(matrix[inside][:, ~inside].sum())


def _cut(fabric: Fabric, bound: Fraction, side: LongArray) -> LinkCut:
    names = tuple(fabric.places[place] for place in side.tolist())
    return LinkCut(bound, names, _crossing(fabric.matrix, side))
