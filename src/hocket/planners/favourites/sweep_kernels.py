"""Favours divided anew op by op, compiled; what it does stands in `sweep`."""

from __future__ import annotations

from typing import NamedTuple

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.planners.favourites.net import ReaderPairs

_MAX_ROUNDS = 20


class Way(NamedTuple):
    """One direction of sweeping, with the edges of each op on the far side."""

    ptr: LongArray
    edge: IntArray
    other: IntArray
    """The op at the far end."""
    near_s: FloatArray
    """Per op: longest path up to it and with it, on the near side."""
    far_s: FloatArray
    """Per op: longest path from it on, with it; what the sweep writes."""
    own_total: FloatArray
    """Per op: favours of its edges on the far side."""
    other_total: FloatArray
    """Per op: favours of its edges on the near side."""


class FavourRoom(NamedTuple):
    """Favours, and room for the edges of one op."""

    favour: FloatArray
    length_s: FloatArray
    cost_s: FloatArray


@kernel
def _gather(net: ReaderPairs, way: Way, cuts: FavourRoom, op: int) -> float:
    """Lengths beyond ``op`` without favours; returns the longest with a whole favour each."""
    level_s = 0.0
    first = way.ptr[op]
    for position in range(first, way.ptr[op + 1]):
        cost_s, far_s = net.cost_s[way.edge[position]], way.far_s[way.other[position]]
        cuts.length_s[position - first] = cost_s + far_s
        cuts.cost_s[position - first] = cost_s
        level_s = max(level_s, far_s)
    return level_s


@kernel
def _least_level(cuts: FavourRoom, num_edges: int, level_s: float) -> float:
    """The lowest level, from ``level_s`` up, to which favours of 1 in all can cut every length.

    The favour that a level takes is convex in it, so Newton's steps from below never go too far.
    """
    for _ in range(_MAX_ROUNDS):
        needed, slope = 0.0, 0.0
        for index in range(num_edges):
            if cuts.length_s[index] > level_s:
                needed += (cuts.length_s[index] - level_s) / cuts.cost_s[index]
                slope += 1.0 / cuts.cost_s[index]
        if needed <= 1.0:
            break
        level_s += (needed - 1.0) / slope
    return level_s


@kernel
def _divide(way: Way, cuts: FavourRoom, op: int, level_s: float) -> float:
    """Give every edge what cuts it to the level; returns the longest that is left."""
    used, longest_s = 0.0, 0.0
    first = way.ptr[op]
    for position in range(first, way.ptr[op + 1]):
        edge, other, index = way.edge[position], way.other[position], position - first
        had, favour = cuts.favour[edge], 0.0
        length_s, cost_s = cuts.length_s[index], cuts.cost_s[index]
        if length_s > level_s:
            # The far op keeps what it has given to others, and rounding must not add to what is.
            room = min(1.0 - used, max(1.0 - way.other_total[other] + had, 0.0))
            favour = min((length_s - level_s) / cost_s, room)
        way.other_total[other] += favour - had
        cuts.favour[edge] = favour
        used += favour
        longest_s = max(longest_s, length_s - cost_s * favour)
    way.own_total[op] = used
    return longest_s


@kernel
def _sweep(
    net: ReaderPairs, way: Way, cuts: FavourRoom, is_backward: bool, target_s: float
) -> float:
    """Divide the favours of every op anew; returns the longest path."""
    longest_s = 0.0
    num_ops = len(net.op_s)
    for count in range(num_ops):
        op = num_ops - 1 - count if is_backward else count
        num_edges = way.ptr[op + 1] - way.ptr[op]
        level_s = max(_gather(net, way, cuts, op), target_s - way.near_s[op])
        level_s = _least_level(cuts, num_edges, level_s)
        way.far_s[op] = net.op_s[op] + _divide(way, cuts, op, level_s)
        longest_s = max(longest_s, way.far_s[op])
    return longest_s


@kernel
def sweep_back_and_forth(
    net: ReaderPairs,
    back: Way,
    forth: Way,
    cuts: FavourRoom,
    longest_s: float,
    num_sweeps: int,
    cut: float,
) -> float:
    """Sweep both ways, each time aiming at a path shorter by the share ``cut``."""
    for _ in range(num_sweeps):
        target_s = longest_s * (1.0 - cut)
        _sweep(net, back, cuts, True, target_s)
        longest_s = _sweep(net, forth, cuts, False, target_s)
    return longest_s
