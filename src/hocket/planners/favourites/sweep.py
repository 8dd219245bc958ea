"""Favours divided anew, op by op: what the descent leaves to be gained close by.

A sweep from the last op to the first gives the edges that begin at each op the favours that make
the longest of them as short as possible, within what the readers have not given to others; edges
that are short enough for the target already give theirs up. The next sweep does the same from the
first op to the last for the edges that end at each op. Paths never grow beyond the longer of the
target and what they were, so it can be stopped at any time. O(edges) per sweep.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.kernels.containers import table
from hocket.planners.favourites.net import ReaderPairs
from hocket.planners.parts.paths import longest_from_start
from hocket.simulate.load import summed

_SWEEPS = 10
_CUT = 0.003
"""Share by which each sweep is to make the longest path shorter."""


def longest_path_s(net: ReaderPairs, favour: FloatArray) -> float:
    """The longest path, with every transfer cut by its favour."""
    return float(_ends_s(net, favour).max(initial=0.0))


def needed_favours(net: ReaderPairs, favour: FloatArray) -> FloatArray:
    """Favours with a longest path that is no longer; free edges too have only what it needs."""
    from hocket.planners.favourites.sweep_kernels import (
        FavourRoom,
        Way,
        sweep_back_and_forth,
    )

    num_ops, num_edges = len(net.op_s), len(net.src)
    head_s, tail_s = _ends_s(net, favour), np.zeros(num_ops)
    out_total, in_total = (summed(ends, favour, num_ops) for ends in (net.src, net.dst))
    most = max(int(np.diff(ptr).max(initial=0)) for ptr in (net.in_ptr, net.out_ptr))
    cuts = FavourRoom(favour=favour.copy(), length_s=np.zeros(most), cost_s=np.zeros(most))
    readers, numbers = net.dst[net.out_edge], np.arange(num_edges)
    back = Way(
        net.out_ptr, net.out_edge, table(readers, np.int32), head_s, tail_s, out_total, in_total
    )
    forth = Way(net.in_ptr, table(numbers, np.int32), net.src, tail_s, head_s, in_total, out_total)
    longest_s = float(head_s.max(initial=0.0))
    sweep_back_and_forth(net, back, forth, cuts, longest_s, _SWEEPS, _CUT)
    return cuts.favour


def _ends_s(net: ReaderPairs, favour: FloatArray) -> FloatArray:
    """Per op: the longest path to its end."""
    sent_s = net.cost_s * (1.0 - favour)
    start_s = np.zeros(len(net.op_s))
    after = table(net.dst[net.out_edge], np.int64)
    longest_from_start(net.out_ptr, after, sent_s[net.out_edge], net.op_s, start_s)
    ends_s: FloatArray = start_s + net.op_s
    return ends_s
