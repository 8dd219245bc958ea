"""Find an op order with a low peak, and a lower bound on the peak of any order.

The graph's own order is hoisted (`hoist`): ops that free memory run early. Minimum cuts at the ops
with the most bytes bound every order. As long as there is a gap, the ops at the peak are moved to
their cheapest moments, for targets between the bound and the peak (`refine`). `release_gradients`
frees gradients after their updates. Graphs of at most 62 ops get an optimal order by dynamic
programming. Effort is counted in cuts and walks, not in time, so the same graph gets the same order
on every machine. O(effort · (ops + reads)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.memory.hoist import memory_curve, peak_bytes
from hocket.planners.memory.refine import (
    Found,
    WorkLeft,
    hoisted_within,
    minimum_cut,
    refined,
)
from hocket.planners.memory.storages import OpTables, Storages, legal, storages_of

# The best order of a small graph, by dynamic programming over the sets of ops that have run.
#
# A set is a 64-bit integer. For each set the lowest peak of all orders that reach it is kept, in
# ascending size of the sets. Sets whose peak is no better than a known order's are dropped. If
# an op fits under the peak so far and frees at least what it allocates, no other op is tried:
# running it at once never hurts (the bytes of sets are submodular). O(sets · ops), at most
# `MAX_SETS`.

MAX_OPS = 62
"""Largest graph for the exact order: a set of ops must fit into one 64-bit integer."""
MAX_SETS = 40_000
_SLOTS = 1 << 17
"""Slots of the hash table: over three times `MAX_SETS`, so that probes stay short."""
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiplier that spreads bit sets over the slots of a hash table (Knuth)."""


class _Sets(NamedTuple):
    mask: LongArray
    held: LongArray
    peak: LongArray
    parent: LongArray
    op: LongArray
    slot: LongArray
    """Number of the set in each slot of the hash table; -1 if empty."""


class _Needs(NamedTuple):
    """Ops as bits of sets."""

    before: LongArray
    """[op]: bit set of the ops that must run before it."""
    readers: LongArray
    """[storage]: bit set of its readers; with a further bit set if it is kept to the end."""


@kernel
def _released(tables: OpTables, needs: _Needs, mask: int, op: int) -> int:
    total: int = tables.passing_bytes[op]
    for at in range(tables.read_ptr[op], tables.read_ptr[op + 1]):
        storage = tables.reads[at]
        if needs.readers[storage] & ~(mask | (np.int64(1) << op)) == 0:
            total += tables.num_bytes[storage]
    return total


@kernel
def _reach_set(sets: _Sets, count: int, at: int, op: int, peak: int, held: int) -> int:
    """Note an order that reaches a set of ops; returns the new number of sets."""
    mask = sets.mask[at] | (np.int64(1) << op)
    # The high bits of the product are mixed best; linear probing resolves collisions.
    slot = ((mask * np.int64(_MIX)) >> 20) & (len(sets.slot) - 1)
    while sets.slot[slot] >= 0 and sets.mask[sets.slot[slot]] != mask:
        slot = (slot + 1) & (len(sets.slot) - 1)
    known = sets.slot[slot]
    if known < 0:
        known = count
        count += 1
        sets.slot[slot] = known
        sets.mask[known] = mask
        sets.held[known] = held
    elif sets.peak[known] <= peak:
        return count
    sets.peak[known] = peak
    sets.parent[known] = at
    sets.op[known] = op
    return count


@kernel
def _fill_sets(tables: OpTables, needs: _Needs, sets: _Sets, limit: int) -> int:
    """Fill in all reachable sets, layer by layer; returns the number of the full set.

    Returns -1 if no order is below ``limit``, or -2 if there are too many sets.
    """
    num_ops = len(needs.before)
    full = (np.int64(1) << num_ops) - 1
    count, at = 1, 0
    while at < count:
        mask = sets.mask[at]
        if mask == full:
            return at
        # Stop before the next set's extensions could overflow the table.
        if count + num_ops >= len(sets.mask):
            return -2
        free = -1
        for op in range(num_ops):
            if mask >> op & 1 == 0 and needs.before[op] & ~mask == 0:
                gives = _released(tables, needs, mask, op) - tables.taken_bytes[op]
                if gives >= 0 and sets.held[at] + tables.taken_bytes[op] <= sets.peak[at]:
                    free = op
                    break
        for op in range(num_ops):
            if mask >> op & 1 or needs.before[op] & ~mask or (free >= 0 and op != free):
                continue
            most = sets.held[at] + tables.taken_bytes[op]
            # An order that is no better than the known one is of no use.
            if most < limit:
                held = most - _released(tables, needs, mask, op)
                count = _reach_set(sets, count, at, op, max(sets.peak[at], most), held)
        at += 1
    return -1


def exact_order(storages: Storages, found: Found) -> tuple[Found, bool]:
    """The best order and True if the graph is small enough, else ``found`` and False."""
    if storages.num_ops > MAX_OPS:
        return found, False
    columns = [zeros(MAX_SETS) for _ in range(5)]
    sets = _Sets._make([*columns, np.full(_SLOTS, -1, dtype=np.int64)])
    last = _fill_sets(storages.tables, _needs(storages), sets, found.peak_bytes)
    if last < 0:
        # -1: no order is below the known peak, so the known order is the best.
        return found, last == -1
    order: list[int] = []
    peak = int(sets.peak[last])
    while last > 0:
        order.append(int(sets.op[last]))
        last = int(sets.parent[last])
    return Found(peak, np.array(order[::-1], dtype=np.int64)), True


def _needs(storages: Storages) -> _Needs:
    bit = np.int64(1) << np.arange(storages.num_ops, dtype=np.int64)
    before = zeros(storages.num_ops)
    np.bitwise_or.at(before, storages.after, bit[storages.before])
    # Bit 62 is never set in a mask of ops, so kept storages are never released.
    readers = np.where(storages.is_kept, np.int64(1) << 62, np.int64(0))
    storage = np.repeat(np.arange(len(readers)), np.diff(storages.reader_ptr))
    np.bitwise_or.at(readers, storage, bit[storages.readers])
    return _Needs(before, readers)


_CUT_OPS = 2_000_000
"""Approximate number of ops that all cuts of one search visit together."""
_MIN_EFFORT, _MAX_EFFORT = 250, 4_000
_SHARES = (0.0, 0.3, 0.6, 0.9)
"""Targets of refining, as fractions of the gap between the bound and the current peak."""
_MAX_CUTS = 24
"""Largest number of cuts computed for one order."""
_STRETCHES = 12
"""Number of parts of an order; the cuts at the fullest op of each part are computed first."""
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class OrderBound:
    """Peak of an order and a lower bound for all orders, with what exists before the step."""

    peak_bytes: int
    start_bytes: int
    """Bytes that exist before the step."""
    bound_bytes: int
    """Lower bound on the peak of any order."""

    @property
    def gap(self) -> float:
        """Excess of the order over the bound, as a fraction, without bytes from before the step."""
        bound = self.bound_bytes - self.start_bytes
        return (self.peak_bytes - self.bound_bytes) / bound if bound else 0.0


def memory_order(graph: Graph) -> IntArray:
    """Order the ops of a graph for a low peak on one device."""
    return bounded_order(graph)[0]


def bounded_order(graph: Graph) -> tuple[IntArray, OrderBound]:
    """Order the ops for a low peak, and bound the distance from the best order."""
    storages = storages_of(graph)
    found, bound_bytes = search(storages)
    return found.order.astype(np.int32), bound_of(storages, found.peak_bytes, bound_bytes)


def order_bound(graph: Graph, order: IntArray) -> OrderBound:
    """Bound the distance of a given order from the best one."""
    storages = storages_of(graph)
    return bound_of(storages, peak_bytes(storages, order.astype(np.int64)), search(storages)[1])


def bound_of(storages: Storages, peak: int, bound_bytes: int) -> OrderBound:
    """Add what exists before the step, and what stays to its end, to a peak and its bound."""
    kept = int(storages.num_bytes[storages.is_kept].sum())
    return OrderBound(
        peak_bytes=storages.start_bytes + peak,
        start_bytes=storages.start_bytes,
        bound_bytes=storages.start_bytes + max(kept, bound_bytes),
    )


def search(storages: Storages) -> tuple[Found, int]:
    """An order with a low peak, and a lower bound on the peak of every order."""
    given = np.arange(storages.num_ops, dtype=np.int64)
    if np.any(storages.before >= storages.after):  # precedences besides those of the graph
        given = legal(storages, given)
    found = Found(peak_bytes(storages, given), given)
    if found.peak_bytes == 0:
        return found, 0
    effort, bound = _effort(storages), 0
    found = hoisted_within(storages, given, found.peak_bytes - 1, effort)
    for _ in range(_ROUNDS if found.peak_bytes else 0):
        before = found.peak_bytes
        bound = max(bound, _largest_cut(storages, found.order))
        for share in _SHARES:
            target = bound + int(share * (found.peak_bytes - bound))
            found = refined(storages, found, target, effort)
        if found.peak_bytes in (bound, before):
            break
    if found.peak_bytes > bound:
        found, is_best = exact_order(storages, found)
        bound = found.peak_bytes if is_best else max(bound, _largest_cut(storages, found.order))
    return found, bound


def _effort(storages: Storages) -> WorkLeft:
    cuts = _CUT_OPS // max(storages.num_ops, 1)
    return WorkLeft(min(max(cuts, _MIN_EFFORT), _MAX_EFFORT))


def _largest_cut(storages: Storages, order: LongArray) -> int:
    """Return the largest minimum cut of the ops at which an order holds most.

    At most `_MAX_CUTS` cuts are tried.
    The fullest op of each stretch is cut first, since an order that is bad in one place tells
    little about where the best order peaks.
    """
    curve = memory_curve(storages, order)
    stretches = np.array_split(np.arange(len(order)), min(_STRETCHES, max(len(order), 1)))
    tops = np.array([part[np.argmax(curve[part])] for part in stretches if len(part)])
    tops = tops[np.argsort(-curve[tops], kind="stable")]
    falling = np.argsort(-curve, kind="stable")
    cut_at: set[int] = set()
    bound = 0
    for position in (*tops.tolist(), *falling.tolist()):
        op = int(order[position])
        if curve[position] > bound and op not in cut_at:
            cut_at.add(op)
            bound = max(bound, minimum_cut(storages, op).num_bytes)
        if len(cut_at) == _MAX_CUTS:
            break
    return bound


# Release gradients as soon as their update has run.
#
# A plain training step holds every gradient to its end, so the order of its updates cannot lower
# the peak. If no code reads gradients after the update, their storages become ordinary results
# that are freed after their last reader. Only roles of tensors change, so planner, simulator and
# executor need no special case. O(reads).


def release_gradients(graph: Graph) -> Graph:
    """The same step, holding each gradient that an update reads only until its last reader."""
    reader = graph.reader
    is_updating = graph.op_phase[reader] == Phase.OPTIMIZER
    is_used = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_used[graph.root_of[graph.reads[is_updating]]] = True
    released = is_used[graph.root_of] & (graph.tensor_role == Role.GRADIENT)
    role = np.where(released, Role.ACTIVATION, graph.tensor_role).astype(np.int8)
    return replace(graph, tensor_role=role)
