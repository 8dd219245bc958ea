"""Redistribution of favours op by op, compiled; see `favourite_child` for the algorithm."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.planners.placement.favourite_child import ReaderPairs

# Rounds of the descent on the soft longest path, compiled; see `favourite_child`.

_FAR = 30.0
"""Temperatures by which a path must be shorter to get no flow: its share would be below 1e-13."""
_NO_FLOW = 1e-9
"""Flow through an op below which what leads there is left alone."""


class Descent(NamedTuple):
    """Arrays that the rounds write."""

    favour: FloatArray
    """Per edge: how much the reader is the producer's favourite; at most 1 in all at either end."""
    weight: FloatArray
    """Per edge: its share in the longest path of its reader, then seconds that a favour saves."""
    start_s: FloatArray
    """Per op: soft longest path to its start."""
    flow: FloatArray
    """Per op: the part of the long paths that run through it."""
    chosen: IntArray
    """Per op: the matched edge that begins there, or -1."""
    taken: IntArray
    """Per op: the matched edge that ends there, or -1."""


@kernel
def _spread(net: ReaderPairs, descent: Descent, temperature_s: float) -> float:
    """Soft longest paths to every op, and the share of each edge in that of its reader."""
    start_s, share = descent.start_s, descent.weight
    longest_s = 0.0
    for op in range(len(net.op_s)):
        first, stop = net.in_ptr[op], net.in_ptr[op + 1]
        latest_s = 0.0
        for edge in range(first, stop):
            src = net.src[edge]
            sent_s = net.cost_s[edge] * (1.0 - descent.favour[edge])
            share[edge] = start_s[src] + net.op_s[src] + sent_s
            latest_s = max(latest_s, share[edge])
        total = 0.0
        for edge in range(first, stop):
            below = (share[edge] - latest_s) / temperature_s
            share[edge] = np.exp(below) if below > -_FAR else 0.0
            total += share[edge]
        for edge in range(first, stop):
            share[edge] /= total
        start_s[op] = latest_s + temperature_s * np.log(total) if total > 1.0 else latest_s
        longest_s = max(longest_s, start_s[op] + net.op_s[op])
    return longest_s


@kernel
def _flow_into_ends(
    net: ReaderPairs, descent: Descent, longest_s: float, temperature_s: float
) -> None:
    """Divide one unit of flow among the ops that nobody reads from."""
    flow, total = descent.flow, 0.0
    for op in range(len(net.op_s)):
        flow[op] = 0.0
        if net.out_ptr[op] == net.out_ptr[op + 1]:
            below = (descent.start_s[op] + net.op_s[op] - longest_s) / temperature_s
            flow[op] = np.exp(below) if below > -_FAR else 0.0
            total += flow[op]
    for op in range(len(net.op_s)):
        flow[op] /= total


@kernel
def _flow_back(net: ReaderPairs, descent: Descent) -> float:
    """Turn shares into the seconds that favours would save; returns the mean edges of a path."""
    flow, weight = descent.flow, descent.weight
    num_edges = 0.0
    for op in range(len(net.op_s) - 1, -1, -1):
        through = flow[op] if flow[op] > _NO_FLOW else 0.0
        for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
            part = through * weight[edge]
            flow[net.src[edge]] += part
            num_edges += part
            weight[edge] = part * net.cost_s[edge]
    return num_edges


@kernel
def _step(net: ReaderPairs, descent: Descent, step: float) -> None:
    """Move towards the matching, but only at the ops that it covers."""
    favour = descent.favour
    for op in range(len(net.op_s)):
        mine = descent.taken[op]
        for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
            if mine >= 0 or descent.chosen[net.src[edge]] >= 0:
                favour[edge] *= 1.0 - step
        if mine >= 0:
            favour[mine] += step


@kernel
def descend(
    net: ReaderPairs, descent: Descent, edge_s: float, temperatures: FloatArray, steps: FloatArray
) -> None:
    """One round per temperature, in mean lengths of an edge, and step.

    ``edge_s`` is a guess of that length, for the first round.
    """
    for index in range(len(temperatures)):
        temperature_s = temperatures[index] * edge_s
        longest_s = _spread(net, descent, temperature_s)
        if longest_s <= 0.0:
            return
        _flow_into_ends(net, descent, longest_s, temperature_s)
        edge_s = longest_s / max(_flow_back(net, descent), 1.0)
        match_heaviest(net, descent.weight, descent.chosen, descent.taken)
        _step(net, descent, steps[index])


# Matching by weight, compiled; see `favourite_child`.


@kernel
def _best_offer(net: ReaderPairs, weight: FloatArray, chosen: IntArray, op: int) -> int:
    """The heaviest edge into ``op`` that its producer would take instead of what it has; or -1."""
    best = -1
    for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
        if weight[edge] <= 0.0 or (best >= 0 and weight[edge] <= weight[best]):
            continue
        rival = chosen[net.src[edge]]
        if rival >= 0 and weight[rival] > weight[edge]:
            continue
        if rival < 0 or weight[rival] < weight[edge] or edge < rival:
            best = edge
    return best


@kernel
def match_heaviest(net: ReaderPairs, weight: FloatArray, chosen: IntArray, taken: IntArray) -> None:
    """Match producers and readers as if edges were taken from the heaviest down, ties in order.

    ``chosen`` gets the edge of each producer, ``taken`` that of each reader, -1 for none.
    """
    for op in range(len(chosen)):
        chosen[op] = taken[op] = -1
    for op in range(len(chosen)):
        reader = op
        while reader >= 0:
            edge = _best_offer(net, weight, chosen, reader)
            if edge < 0:
                break
            rival = chosen[net.src[edge]]
            chosen[net.src[edge]] = taken[reader] = edge
            reader = -1
            if rival >= 0:
                reader = net.dst[rival]
                taken[reader] = -1


@kernel
def match_once(net: ReaderPairs, weight: FloatArray, chosen: IntArray, taken: IntArray) -> None:
    """One matching; see `match_heaviest`."""
    match_heaviest(net, weight, chosen, taken)


_MAX_ROUNDS = 20


class Direction(NamedTuple):
    """One direction of sweeping, with the edges of each op on the far side."""

    ptr: LongArray
    edge: IntArray
    other: IntArray
    """The op at the far end."""
    near_s: FloatArray
    """Per op: longest path up to it and with it, on the near side."""
    far_s: FloatArray
    """Per op: longest path from it on, with it; written by the sweep."""
    own_total: FloatArray
    """Per op: favours of its edges on the far side."""
    other_total: FloatArray
    """Per op: favours of its edges on the near side."""


class FavourScratch(NamedTuple):
    """Favours, and scratch arrays for the edges of one op."""

    favour: FloatArray
    length_s: FloatArray
    cost_s: FloatArray


@kernel
def _gather(net: ReaderPairs, direction: Direction, cuts: FavourScratch, op: int) -> float:
    """Lengths beyond ``op`` without favours; returns the longest with a favour of 1 each."""
    level_s = 0.0
    first = direction.ptr[op]
    for position in range(first, direction.ptr[op + 1]):
        cost_s = net.cost_s[direction.edge[position]]
        far_s = direction.far_s[direction.other[position]]
        cuts.length_s[position - first] = cost_s + far_s
        cuts.cost_s[position - first] = cost_s
        level_s = max(level_s, far_s)
    return level_s


@kernel
def _least_level(cuts: FavourScratch, num_edges: int, level_s: float) -> float:
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
def _divide(direction: Direction, cuts: FavourScratch, op: int, level_s: float) -> float:
    """Give every edge what cuts it to the level; returns the longest that is left."""
    used, longest_s = 0.0, 0.0
    first = direction.ptr[op]
    for position in range(first, direction.ptr[op + 1]):
        edge, other, index = direction.edge[position], direction.other[position], position - first
        had, favour = cuts.favour[edge], 0.0
        length_s, cost_s = cuts.length_s[index], cuts.cost_s[index]
        if length_s > level_s:
            # The far op keeps the favours that it gave to others. The clamp at 0 guards against
            # rounding errors.
            available = min(1.0 - used, max(1.0 - direction.other_total[other] + had, 0.0))
            favour = min((length_s - level_s) / cost_s, available)
        direction.other_total[other] += favour - had
        cuts.favour[edge] = favour
        used += favour
        longest_s = max(longest_s, length_s - cost_s * favour)
    direction.own_total[op] = used
    return longest_s


@kernel
def _sweep(
    net: ReaderPairs, direction: Direction, cuts: FavourScratch, is_backward: bool, target_s: float
) -> float:
    """Redistribute the favours of every op; returns the longest path."""
    longest_s = 0.0
    num_ops = len(net.op_s)
    for count in range(num_ops):
        op = num_ops - 1 - count if is_backward else count
        num_edges = direction.ptr[op + 1] - direction.ptr[op]
        level_s = max(_gather(net, direction, cuts, op), target_s - direction.near_s[op])
        level_s = _least_level(cuts, num_edges, level_s)
        direction.far_s[op] = net.op_s[op] + _divide(direction, cuts, op, level_s)
        longest_s = max(longest_s, direction.far_s[op])
    return longest_s


@kernel
def sweep_back_and_forth(
    net: ReaderPairs,
    back: Direction,
    forth: Direction,
    cuts: FavourScratch,
    longest_s: float,
    num_sweeps: int,
    cut: float,
) -> float:
    """Sweep in both directions, each time aiming at a path shorter by the share ``cut``."""
    for _ in range(num_sweeps):
        target_s = longest_s * (1.0 - cut)
        _sweep(net, back, cuts, True, target_s)
        longest_s = _sweep(net, forth, cuts, False, target_s)
    return longest_s
