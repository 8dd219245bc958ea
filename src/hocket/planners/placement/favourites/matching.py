"""Rounding shares to favourites: a matching of the edges that have at least half a share.

Greedy by share times cost, the time that an edge spares; an op has at most one share on either side,
so only equal halves ever contend. Baechi asks for nine tenths of a share, which loses favourites
between ops with several children. Matching smaller shares too was tried: devices then wait for ops that
the relaxation hardly favours, and the textbook graph of Hanen and Munier gets 42 instead of 36.
An edge that is alone on both its ends has its whole share at no price, which says nothing about its worth:
it counts where paying for its transfer would make the longest path longer. O(edges log edges).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray, IntArray
from hocket.compiled.containers import zeros
from hocket.planners.placement.favourites.edges import Edges, only_edges

_LEAST_SHARE = 0.5 - 1e-6
"""Half, but for what solvers leave of it."""
_TOLERANCE = 1e-9


def round_shares(edges: Edges, share: FloatArray) -> IntArray:
    """Per op its favourite child, or -1; each op is the favourite of at most one."""
    from hocket.planners.placement.favourites.passes import match

    child = np.full(len(edges.op_s), -1, dtype=np.int32)
    if not len(share):
        return child
    is_worth = np.where(only_edges(edges), _are_needed(edges, share), share >= _LEAST_SHARE)
    worth = np.flatnonzero(is_worth & (edges.cost_s > 0))
    ranked = worth[np.argsort(-share[worth] * edges.cost_s[worth], kind="stable")]
    has_child, has_parent = np.zeros((2, len(child)), dtype=np.bool_)
    matched = zeros(len(child))
    chosen = matched[: match(edges, ranked, has_child, has_parent, matched)]
    child[edges.src[chosen]] = edges.dst[chosen]
    return child


def _are_needed(edges: Edges, share: FloatArray) -> NDArray[np.bool_]:
    """Per edge: whether the longest path would be longer if its transfer were not free at all."""
    from hocket.planners.placement.favourites.passes import longest, rest

    reach_s, rest_s = np.zeros((2, len(edges.op_s)))
    longest_s = longest(edges, share, reach_s)
    rest(edges, share, rest_s)
    paid_s = reach_s[edges.src] + edges.op_s[edges.src] + edges.cost_s + rest_s[edges.dst]
    needed: NDArray[np.bool_] = paid_s > longest_s * (1 + _TOLERANCE)
    return needed
