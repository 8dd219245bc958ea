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
from hocket.planners.communication.flow import UNLIMITED, flow_graph, max_flow
from hocket.planners.memory.hoist import hoisted, memory_curve, peak_bytes
from hocket.planners.memory.storages import OpTables, Storages, passing_through

# Lower bound on the bytes that any order holds when a given op runs, as a minimum cut.
#
# Just before an op runs, the set of ops that have run contains all of its predecessors, none of its
# successors, and with each op all predecessors of that op. The bytes of such a set are those of the
# storages with a producer inside and a reader outside, so the smallest such set is a minimum
# cut: one arc per storage with its bytes, arcs without limit from each op to those before it
# (Picard, 1976, "Maximal closure of a graph", on storages instead of weights). Bytes are whole
# numbers, so nothing is rounded. Only ops that are neither predecessors nor successors of the op
# are nodes of the flow. SciPy's flows hold 32-bit numbers only, hence
# `hocket.planners.communication.flow`.

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


def sides_of(tables: OpTables, op: int) -> LongArray:
    """[op]: side of ``op`` on which each op is."""
    side, stack = zeros(len(tables.num_waits)), zeros(len(tables.num_waits) + 1)
    stack[0] = op
    _reach(tables.before_ptr, tables.before, BEFORE, side, stack)
    stack[0] = op
    _reach(tables.after_ptr, tables.after, AFTER, side, stack)
    side[op] = AFTER
    return side


_SOURCE, _SINK = 0, 1


def minimum_cut(storages: Storages, op: int) -> OpCut:
    """Find the cheapest moment for ``op`` by a minimum cut."""
    side = sides_of(storages.tables, op)
    is_between = side == BETWEEN
    # Nodes: ops before ``op`` are the source, it and those after it the sink; then ops between,
    # then the storages that live ops make.
    node = np.where(side == BEFORE, _SOURCE, _SINK)
    node[is_between] = 2 + np.arange(np.count_nonzero(is_between))
    alive = np.flatnonzero(node[storages.producer] != _SINK)
    storage = np.full(len(storages.producer), _SINK)
    storage[alive] = node.max(initial=_SINK) + 1 + np.arange(len(alive))
    of_reader = np.repeat(storage, np.diff(storages.reader_ptr))
    kept = storage[storages.is_kept]
    pairs = np.concatenate([
        np.stack((node[storages.producer[alive]], storage[alive])),
        np.stack((of_reader, node[storages.readers])),
        np.stack((kept, np.full(len(kept), _SINK))),
        np.stack((node[storages.after], node[storages.before])),
    ], axis=1)  # fmt: skip
    limits = np.full(pairs.shape[1], UNLIMITED)
    limits[: len(alive)] = storages.num_bytes[alive]
    # Arcs out of the sink, into the source, or within one node limit nothing.
    is_arc = (pairs[0] != _SINK) & (pairs[1] != _SOURCE) & (pairs[0] != pairs[1])
    graph, place = flow_graph(int(is_between.sum()) + len(alive) + 2, pairs.T[is_arc])
    capacity = zeros(len(graph.arc_head))
    capacity[place] = limits[is_arc]
    total = int(max_flow(graph, capacity, _SOURCE, _SINK, UNLIMITED))
    # Nodes that the last search from the source reached are on the source's side of the cut.
    has_run = side == BEFORE
    has_run[is_between] = graph.level[node[is_between]] >= 0
    return OpCut(op, total + int(storages.tables.taken_bytes[op]), has_run)


_MAX_ROUNDS = 8
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


def hoisted_within(storages: Storages, base: LongArray, target: int, effort: WorkLeft) -> Found:
    """The better of an order and the one that hoists its ops within ``target``."""
    known = Found(peak_bytes(storages, base), base)
    if known.peak_bytes <= target or not effort.take(_WALK_CUTS):
        return known
    order, peak = hoisted(storages, base, target)
    return Found(peak, order) if peak < known.peak_bytes else known


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
        # The same conflict twice in a row: giving it precedence again changes nothing.
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
        now = hoisted_within(storages, base, target, effort)
        order = now.order
        if now.peak_bytes < best.peak_bytes:
            best = now
    return best, -1
