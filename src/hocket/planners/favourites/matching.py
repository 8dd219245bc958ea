"""Whole favourites from favours: a matching of producers and readers of great weight.

The weight of an edge is its favour times its transfer. Edges with a whole favour are kept. If few
others are undecided, their matching has the greatest weight (shortest augmenting paths, Jonker and
Volgenant 1987; quadratic in practice); if many, they are taken from the heaviest down, which gives
half of it at least: readers offer themselves to producers, which keep the heaviest edge, and who is
displaced tries elsewhere (suitors, Manne and Halappanavar 2014; O(edges) in practice).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.planners.favourites.net import ReaderPairs

_ROUNDING = 1e-6
"""Favours closer than this to 0 and 1 are taken to be those."""
_MAX_EXACT_EDGES = 5_000
"""Up to as many undecided edges are matched exactly."""


def match_favourites(net: ReaderPairs, favour: FloatArray) -> IntArray:
    """The favourite child of each op, or -1; no op is the favourite of two."""
    child = np.full(len(net.op_s), -1, dtype=np.int32)
    whole = np.flatnonzero(favour >= 1 - _ROUNDING)
    child[net.src[whole]] = net.dst[whole]
    is_child = np.zeros(len(net.op_s), dtype=np.bool_)
    is_child[net.dst[whole]] = True
    undecided = (favour > _ROUNDING) & (net.cost_s > 0) & (child[net.src] < 0) & ~is_child[net.dst]
    edge = np.flatnonzero(undecided)
    match = _match_exactly if len(edge) <= _MAX_EXACT_EDGES else _match_heaviest
    chosen = match(net, edge, favour[edge] * net.cost_s[edge])
    child[net.src[chosen]] = net.dst[chosen]
    return child


def _match_exactly(net: ReaderPairs, edge: LongArray, weight: FloatArray) -> LongArray:
    """The edges of a matching of the greatest weight."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    if not len(edge):
        return edge
    src, row = np.unique(net.src[edge], return_inverse=True)
    dst, column = np.unique(net.dst[edge], return_inverse=True)
    # Every producer has a reader of its own to fall back on, so that all of them can be matched;
    # then 1 more on every edge changes nothing, and keeps weights from being taken for absent.
    spare = np.arange(len(src))
    value = np.concatenate((1 + weight / weight.max(), np.ones(len(src))))
    ends = np.concatenate((row, spare)), np.concatenate((column, len(dst) + spare))
    matrix = csr_array((value, ends), shape=(len(src), len(dst) + len(src)))
    rows, columns = min_weight_full_bipartite_matching(matrix, maximize=True)
    partner = np.full(len(src), -1)
    partner[rows] = columns
    return edge[np.flatnonzero(partner[row] == column)]


def _match_heaviest(net: ReaderPairs, edge: LongArray, weight: FloatArray) -> LongArray:
    """The edges that are left when they are taken from the heaviest down, ties in order."""
    from hocket.planners.favourites.match_kernels import match_once

    of_all = np.zeros(len(net.src))
    of_all[edge] = weight
    chosen, taken = (np.full(len(net.op_s), -1, dtype=np.int32) for _ in range(2))
    match_once(net, of_all, chosen, taken)
    return chosen[chosen >= 0].astype(np.int64)
