"""Refine an order at its peak: run the peak's op at its cheapest moment, then the next peak's.

The minimum cut of the op with the most bytes shows which ops should have run by then. They are put
before it and all others behind it, for good, and both parts are hoisted again. This is repeated for
the next peak until the target is reached, or until the cheapest moment of a peak under the fixed
precedences exceeds the target. Then the ops in conflict are known, and the next round gives the
last one precedence. O(walks · (cut + hoist)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.communication.flow import UNLIMITED, FlowGraph, max_flow
from hocket.planners.memory.hoist import hoisted, memory_curve, peak_bytes
from hocket.planners.memory.storages import Direction, Storages, passing_through

# The least bytes that any order holds when a given op runs, as a minimum cut.
#
# Just before an op runs, a set of ops has run that holds all that comes before it, nothing that
# comes after it, and with each op all that comes before that one. The bytes of such a set are those
# of the storages with a producer inside and a reader outside, so the least of them is a minimum
# cut: one arc per storage with its bytes, arcs without limit from each op to those before it
# (Picard, 1976, "Maximal closure of a graph", on storages instead of weights). Whole bytes, so
# nothing is rounded. Only ops that are neither before nor after the given one take part. Dinic's
# algorithm, see `hocket.planners.communication.flow`.

BETWEEN, BEFORE, AFTER = 0, 1, 2
"""Sides of an op: ops on either side of it, ops before it, and itself with ops after it."""


class OpCut(NamedTuple):
    """The cheapest moment to run an op."""

    op: int
    num_bytes: int
    """Bytes held while the op runs: a lower bound over all orders."""
    has_run: BoolArray
    """[op]: True if it has run at that moment."""


@kernel
def _reach(ptr: LongArray, nodes: LongArray, mark: int, side: LongArray, stack: LongArray) -> None:
    """Mark all nodes that can be reached from ``stack[0]``, but not this node itself."""
    size = 1
    while size > 0:
        size -= 1
        node = stack[size]
        for at in range(ptr[node], ptr[node + 1]):
            if side[nodes[at]] != mark:
                side[nodes[at]] = mark
                stack[size] = nodes[at]
                size += 1


def sides_of(direction: Direction, op: int) -> LongArray:
    """[op]: side of ``op`` on which each op is."""
    side, stack = zeros(len(direction.num_waits)), zeros(len(direction.num_waits) + 1)
    stack[0] = op
    _reach(direction.before_ptr, direction.before, BEFORE, side, stack)
    stack[0] = op
    _reach(direction.after_ptr, direction.after, AFTER, side, stack)
    side[op] = AFTER
    return side


def taken_by(storages: Storages, op: int) -> int:
    """Bytes that an op allocates when it starts."""
    first, stop = np.searchsorted(storages.producer, [op, op + 1])
    return int(storages.num_bytes[first:stop].sum() + storages.passing_bytes[op])


class _Network(NamedTuple):
    """Arcs between pairs of nodes, with capacities, before they are sorted by node."""

    number: LongArray
    """[op]: node of each op that may run on either side; -1 for others."""
    tail: LongArray
    head: LongArray
    limit: LongArray
    size: LongArray
    """Two numbers: of pairs and of nodes."""


_SOURCE, _SINK = 0, 1


@kernel
def _node(network: _Network, side: LongArray, op: int) -> int:
    if side[op] == BEFORE:
        return _SOURCE
    if side[op] == AFTER:
        return _SINK
    if network.number[op] < 0:
        network.number[op] = network.size[1]
        network.size[1] += 1
    found: int = network.number[op]
    return found


@kernel
def _add(network: _Network, tail: int, head: int, limit: int) -> None:
    at = network.size[0]
    network.size[0] += 1
    network.tail[at] = tail
    network.head[at] = head
    network.limit[at] = limit


@kernel
def _list_pairs(
    network: _Network,
    side: LongArray,
    num_bytes: LongArray,
    producer: LongArray,
    is_kept: BoolArray,
    reader_ptr: LongArray,
    readers: LongArray,
    before: LongArray,
    after: LongArray,
) -> None:
    for storage in range(len(producer)):
        if side[producer[storage]] == AFTER:
            continue
        goes_on, num_inner, inner = is_kept[storage], 0, 0
        for at in range(reader_ptr[storage], reader_ptr[storage + 1]):
            if side[readers[at]] == AFTER:
                goes_on = True
            elif side[readers[at]] == BETWEEN:
                num_inner += 1
                inner = at
        if num_inner == 0 and not goes_on:
            continue
        tail, size = _node(network, side, producer[storage]), num_bytes[storage]
        if goes_on:
            _add(network, tail, _SINK, size)
            continue
        if num_inner == 1:
            _add(network, tail, _node(network, side, readers[inner]), size)
            continue
        own = network.size[1]
        network.size[1] += 1
        _add(network, tail, own, size)
        for at in range(reader_ptr[storage], reader_ptr[storage + 1]):
            if side[readers[at]] == BETWEEN:
                head = _node(network, side, readers[at])
                _add(network, own, head, UNLIMITED)
    for at in range(len(before)):
        if side[before[at]] == BETWEEN and side[after[at]] == BETWEEN:
            tail = _node(network, side, after[at])
            _add(network, tail, _node(network, side, before[at]), UNLIMITED)


@kernel
def _link(network: _Network, graph: FlowGraph, place: LongArray) -> None:
    """Sort both arcs of each pair by their tails."""
    ptr, num_pairs = graph.arc_ptr, network.size[0]
    for at in range(num_pairs):
        ptr[network.tail[at] + 1] += 1
        ptr[network.head[at] + 1] += 1
    for node in range(1, len(ptr)):
        ptr[node] += ptr[node - 1]
    free = graph.next_arc
    for node in range(len(free)):
        free[node] = ptr[node]
    for at in range(num_pairs):
        tail, head = network.tail[at], network.head[at]
        there, back = free[tail], free[head]
        free[tail] += 1
        free[head] += 1
        graph.arc_head[there], graph.arc_head[back] = head, tail
        graph.arc_reverse[there], graph.arc_reverse[back] = back, there
        place[at] = there


def minimum_cut(storages: Storages, op: int) -> OpCut:
    """Find the cheapest moment for ``op`` by a minimum cut."""
    side = sides_of(storages.forwards, op)
    before, after = storages.before, storages.after
    most = len(storages.producer) + len(storages.readers) + len(before)
    network = _Network(
        number=np.full(storages.num_ops, -1, dtype=np.int64),
        tail=zeros(most), head=zeros(most), limit=zeros(most),
        size=np.array([0, 2]),
    )  # fmt: skip
    _list_pairs(
        network, side, storages.num_bytes, storages.producer, storages.is_kept,
        storages.reader_ptr, storages.readers, before, after,
    )  # fmt: skip
    num_pairs, num_nodes = network.size.tolist()
    graph = FlowGraph(
        arc_ptr=zeros(num_nodes + 1),
        arc_head=zeros(2 * num_pairs),
        arc_reverse=zeros(2 * num_pairs),
        level=zeros(num_nodes),
        next_arc=zeros(num_nodes),
        path=zeros(num_nodes + 1),
    )
    place, capacity = zeros(num_pairs), zeros(2 * num_pairs)
    _link(network, graph, place)
    capacity[place] = network.limit[:num_pairs]
    total = int(max_flow(graph, capacity, _SOURCE, _SINK, UNLIMITED))
    has_run = side == BEFORE
    inner = network.number >= 0
    has_run[inner] = graph.level[network.number[inner]] >= 0
    return OpCut(op, total + taken_by(storages, op), has_run)


_MAX_ROUNDS = 8
_TURNS = 6
_WALK_CUTS = 4
"""Number of cuts that take about as long as one walk."""


class Found(NamedTuple):
    """An order and its peak."""

    peak_bytes: int
    order: LongArray


@dataclass
class WorkLeft:
    """Work that a search may still do, in cuts, so that results never depend on the clock."""

    left: int
    """Number of cuts that are left."""

    def take(self, cuts: int) -> bool:
        """Subtract work; returns True if there was enough left."""
        self.left -= cuts
        return self.left >= 0


def hoisted_both_directions(
    storages: Storages, base: LongArray, target: int, effort: WorkLeft
) -> Found:
    """The best order of a few walks from both ends, each along the order of the walk before.

    The walks end as soon as one stays within ``target``, which ops that run early may not
    exceed.
    """
    best, order = Found(peak_bytes(storages, base), base), base
    for turn in range(_TURNS):
        is_backwards = turn % 2 == 1
        before = best.peak_bytes
        if before <= target or not effort.take(_WALK_CUTS):
            break
        order, peak = hoisted(storages, order, target, backwards=is_backwards)
        if peak < before:
            best = Found(peak, order)
        elif is_backwards:
            break
    return best


def refined(storages: Storages, found: Found, target: int, effort: WorkLeft) -> Found:
    """The best order found while the peaks above ``target`` are refined."""
    best = found
    first: list[int] = []
    for _ in range(_MAX_ROUNDS):
        if best.peak_bytes <= target or effort.left <= 0:
            break
        now, conflict = _fixed_in_turn(storages, best, first, target, effort)
        if now.peak_bytes < best.peak_bytes:
            best = now
        elif conflict < 0 or first[:1] == [conflict]:
            break
        if conflict >= 0:
            first = [conflict, *(op for op in first if op != conflict)]
    return best


def _fixed_in_turn(
    storages: Storages, found: Found, first: list[int], target: int, effort: WorkLeft
) -> tuple[Found, int]:
    """Fix the moments of the ops at the peaks, those of ``first`` before others.

    Returns the best order, and the op for which no moment within the target was left, or -1.
    """
    best, order = found, found.order
    waiting = list(first)
    while effort.take(1):
        curve = memory_curve(storages, order)
        if curve.max(initial=0) <= target:
            break
        op = waiting.pop(0) if waiting else int(order[int(np.argmax(curve))])
        cut = minimum_cut(storages, op)
        if cut.num_bytes > target:
            return best, op
        storages = passing_through(storages, cut.has_run, op)
        rest = ~cut.has_run
        rest[op] = False
        base = np.concatenate((order[cut.has_run[order]], np.array([op]), order[rest[order]]))
        now = hoisted_both_directions(storages, base, target, effort)
        order = now.order
        if now.peak_bytes < best.peak_bytes:
            best = now
    return best, -1
