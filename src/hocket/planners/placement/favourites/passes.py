"""Compiled passes over the edges, each O(edges): path lengths, flows, balancing, matching."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray
from hocket.compiled.jit import compiled, compiled_entry
from hocket.planners.placement.favourites.edges import Edges

_FAINT = -30.0
"""Exponents below this are taken as 0."""
_MIN_FLOW = 1e-7


class Sweep(NamedTuple):
    """Ops, and the edges towards them and away from them, in one of the two directions."""

    order: ByteArray
    op_s: FloatArray
    cost_s: FloatArray
    behind: ByteArray
    """Per edge: the op that comes earlier in ``order``."""
    ahead: ByteArray
    in_ptr: ByteArray
    incoming: ByteArray
    out_ptr: ByteArray
    outgoing: ByteArray


class Scratch(NamedTuple):
    """Room to work in."""

    start_s: FloatArray
    least_s: FloatArray
    """Per edge: the part of its cost that stays, as its first op divides its share."""
    base_s: FloatArray
    cost_s: FloatArray


@compiled_entry("hocket.planners.placement.favourites.edges")
def longest(edges: Edges, share: FloatArray, reach_s: FloatArray) -> float:
    """Fill in the longest path to the start of each op; returns the longest of all."""
    end_s = 0.0
    for op in range(len(edges.op_s)):
        reach_s[op] = 0.0
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            src = edges.src[edge]
            path_s = reach_s[src] + edges.op_s[src] + edges.cost_s[edge] * (1.0 - share[edge])
            reach_s[op] = max(reach_s[op], path_s)
        end_s = max(end_s, reach_s[op] + edges.op_s[op])
    return end_s


@compiled_entry("hocket.planners.placement.favourites.edges")
def rest(edges: Edges, share: FloatArray, rest_s: FloatArray) -> None:
    """Fill in the longest path from the start of each op to the end."""
    for op in range(len(edges.op_s) - 1, -1, -1):
        rest_s[op] += edges.op_s[op]
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            src = edges.src[edge]
            rest_s[src] = max(rest_s[src], rest_s[op] + edges.cost_s[edge] * (1.0 - share[edge]))


@compiled_entry("hocket.planners.placement.favourites.edges")
def depth(edges: Edges, share: FloatArray, reach_s: FloatArray) -> int:
    """Number of ops on the longest path, of those that are equally long on the first."""
    op, count = 0, 1
    for other in range(len(edges.op_s)):
        if reach_s[other] + edges.op_s[other] > reach_s[op] + edges.op_s[op]:
            op = other
    while edges.in_ptr[op] < edges.in_ptr[op + 1]:
        latest_s, before = -1.0, op
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            src = edges.src[edge]
            path_s = reach_s[src] + edges.op_s[src] + edges.cost_s[edge] * (1.0 - share[edge])
            if path_s > latest_s:
                latest_s, before = path_s, src
        op = before
        count += 1
    return count


@compiled_entry("hocket.planners.placement.favourites.edges")
def soft_longest(edges: Edges, share: FloatArray, blur_s: float, reach_s: FloatArray) -> None:
    """As `longest`, with maxima blurred: log-sum-exp at a temperature of ``blur_s``."""
    for op in range(len(edges.op_s)):
        latest_s = 0.0
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            src = edges.src[edge]
            path_s = reach_s[src] + edges.op_s[src] + edges.cost_s[edge] * (1.0 - share[edge])
            latest_s = max(latest_s, path_s)
        total = 0.0
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            src = edges.src[edge]
            path_s = reach_s[src] + edges.op_s[src] + edges.cost_s[edge] * (1.0 - share[edge])
            exponent = (path_s - latest_s) / blur_s
            if exponent > _FAINT:
                total += math.exp(exponent)
        reach_s[op] = latest_s + blur_s * math.log(max(total, 1.0))


@compiled_entry("hocket.planners.placement.favourites.edges")
def flows(
    edges: Edges,
    share: FloatArray,
    blur_s: float,
    reach_s: FloatArray,
    op_flow: FloatArray,
    flow: FloatArray,
    used: ByteArray,
) -> int:
    """How much of one unit that runs along the longest paths takes each edge.

    Fills in ``flow`` for the edges that are then listed in ``used``; returns how many.
    """
    num_ops, end_s, total, count = len(edges.op_s), 0.0, 0.0, 0
    for op in range(num_ops):
        end_s = max(end_s, reach_s[op] + edges.op_s[op])
    for op in range(num_ops):
        op_flow[op] = 0.0
        exponent = (reach_s[op] + edges.op_s[op] - end_s) / blur_s
        if edges.out_ptr[op] == edges.out_ptr[op + 1] and exponent > _FAINT:
            op_flow[op] = math.exp(exponent)
            total += op_flow[op]
    for op in range(num_ops - 1, -1, -1):
        if edges.out_ptr[op] == edges.out_ptr[op + 1]:
            op_flow[op] /= total
        if op_flow[op] < _MIN_FLOW:
            continue
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            src = edges.src[edge]
            path_s = reach_s[src] + edges.op_s[src] + edges.cost_s[edge] * (1.0 - share[edge])
            exponent = (path_s - reach_s[op]) / blur_s
            if exponent > _FAINT:
                flow[edge] = op_flow[op] * math.exp(exponent)
                op_flow[src] += flow[edge]
                used[count] = edge
                count += 1
    return count


@compiled_entry("hocket.planners.placement.favourites.edges")
def match(
    edges: Edges,
    ranked: ByteArray,
    has_child: NDArray[np.bool_],
    has_parent: NDArray[np.bool_],
    matched: ByteArray,
) -> int:
    """Take edges in the given order where both ends are free; returns how many."""
    has_child[:] = False
    has_parent[:] = False
    count = 0
    for edge in ranked:
        src, dst = edges.src[edge], edges.dst[edge]
        if not has_child[src] and not has_parent[dst]:
            has_child[src] = True
            has_parent[dst] = True
            matched[count] = edge
            count += 1
    return count


@compiled_entry("hocket.planners.placement.favourites.edges")
def shift(
    edges: Edges,
    share: FloatArray,
    step: float,
    has_child: NDArray[np.bool_],
    has_parent: NDArray[np.bool_],
    matched: ByteArray,
) -> None:
    """Move the shares of all edges at matched ops a step towards the matching."""
    for op in range(len(edges.op_s)):
        for edge in range(edges.in_ptr[op], edges.in_ptr[op + 1]):
            if has_parent[op] or has_child[edges.src[edge]]:
                share[edge] *= 1.0 - step
    for edge in matched:
        share[edge] += step


@compiled
def _level_s(scratch: Scratch, count: int) -> float:
    """The smallest level from which the given bases can be reached with one share in all.

    Reaching a base from ``level`` takes the share 1 - (level - base) / cost, and no level is below
    a base. Newton's method: the sum of shares is convex and falls with the level.
    """
    level_s = 0.0
    for index in range(count):
        level_s = max(level_s, scratch.base_s[index])
    while True:
        total, slope, num_active = -1.0, 0.0, 0
        for index in range(count):
            base_s, cost_s = scratch.base_s[index], scratch.cost_s[index]
            if cost_s > 0.0 and base_s + cost_s > level_s:
                total += 1.0 + base_s / cost_s
                slope += 1.0 / cost_s
                num_active += 1
        # The second condition ends steps that only rounding still moves.
        if num_active < 2 or total / slope <= level_s * (1.0 + 1e-12):
            return level_s
        level_s = total / slope


@compiled
def _start_s(sweep: Sweep, scratch: Scratch, op: int) -> float:
    """The earliest start of an op that the shares of its incoming edges allow."""
    count, start_s = 0, 0.0
    for index in range(sweep.in_ptr[op], sweep.in_ptr[op + 1]):
        edge = sweep.incoming[index]
        behind = sweep.behind[edge]
        scratch.base_s[count] = scratch.start_s[behind] + sweep.op_s[behind]
        scratch.cost_s[count] = sweep.cost_s[edge]
        start_s = max(start_s, scratch.base_s[count] + scratch.least_s[edge])
        count += 1
    return max(start_s, _level_s(scratch, count))


@compiled_entry("hocket.planners.placement.favourites.edges")
def balance(sweep: Sweep, rest_s: FloatArray, share: FloatArray, scratch: Scratch) -> None:
    """Set the shares anew, op by op, given how long the rest takes from the start of each op on.

    Each op divides its share among the edges ahead so that all paths through it end as early as
    they can together; the op ahead takes of it what it needs to start when its other edges let it.
    The longest path does not become longer than the one that ``rest_s`` was measured on.
    """
    for op in sweep.order:
        start_s = _start_s(sweep, scratch, op)
        scratch.start_s[op] = start_s
        for index in range(sweep.in_ptr[op], sweep.in_ptr[op + 1]):
            edge = sweep.incoming[index]
            behind, cost_s = sweep.behind[edge], sweep.cost_s[edge]
            wait_s = start_s - scratch.start_s[behind] - sweep.op_s[behind]
            share[edge] = max(0.0, 1.0 - wait_s / cost_s) if cost_s > 0.0 else 0.0
        count = 0
        for index in range(sweep.out_ptr[op], sweep.out_ptr[op + 1]):
            edge = sweep.outgoing[index]
            scratch.base_s[count] = rest_s[sweep.ahead[edge]]
            scratch.cost_s[count] = sweep.cost_s[edge]
            count += 1
        level_s = _level_s(scratch, count)
        for index in range(sweep.out_ptr[op], sweep.out_ptr[op + 1]):
            edge = sweep.outgoing[index]
            slack_s = level_s - rest_s[sweep.ahead[edge]]
            scratch.least_s[edge] = max(0.0, min(sweep.cost_s[edge], slack_s))
