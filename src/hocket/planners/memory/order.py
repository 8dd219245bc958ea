"""An order of a step's ops that holds few bytes at once, and a bound on how few are possible.

A portfolio: the graph's own order and the demand-driven ones, all hoisted (`hoist`). Cuts at the
ops with the most bytes bound every order (`cut`). While there is a gap, the peak's ops are moved to
their cheapest moments, towards targets between the bound and the peak (`refine`); graphs of at most
62 ops get their best order (`exact`). The effort is counted in walks over the graph, so the same
graph gives the same order on every machine. O(effort · pins).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, cast

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.graph.graph import Graph
from hocket.kernels import kernel
from hocket.kernels.containers import Heaps, new_heaps, zeros
from hocket.kernels.heaps import pop, push
from hocket.planners.memory.hoist import LONG_REACH, SHORT_REACH, memory_curve, peak_bytes
from hocket.planners.memory.refine import (
    Found,
    WorkLeft,
    hoisted_both_directions,
    minimum_cut,
    refined,
)
from hocket.planners.memory.storages import Direction, Storages, legal, storages_of

# The best order of a small graph, by dynamic programming over the sets of ops that have run.
#
# A set is a word of bits; for each one the least peak of all orders that reach it is kept, layer by
# layer of equal size. Sets whose peak is no better than a known order are dropped. Where an op can
# run under the peak so far that takes no more than it gives back, nothing else is tried: running it
# at once never hurts (the bytes of sets are submodular). O(sets · ops), at most `MAX_SETS`.

MAX_OPS = 62
"""Bits of a word."""
MAX_SETS = 40_000
_SLOTS = 1 << 17
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads words over the slots (Knuth's multiplicative hashing)."""


class _Sets(NamedTuple):
    mask: LongArray
    held: LongArray
    peak: LongArray
    parent: LongArray
    op: LongArray
    slot: LongArray
    """Number of the set in each slot of the hash table, or -1."""


class _Words(NamedTuple):
    before: LongArray
    """Per op: what must have run."""
    taken: LongArray
    passing: LongArray
    read_ptr: LongArray
    reads: LongArray
    readers: LongArray
    """Per storage: who reads it; all bits and more where it is kept."""
    num_bytes: LongArray


@kernel
def _released(words: _Words, mask: int, op: int) -> int:
    total: int = words.passing[op]
    for at in range(words.read_ptr[op], words.read_ptr[op + 1]):
        storage = words.reads[at]
        if words.readers[storage] & ~(mask | (np.int64(1) << op)) == 0:
            total += words.num_bytes[storage]
    return total


@kernel
def _reach_set(sets: _Sets, count: int, at: int, op: int, peak: int, held: int) -> int:
    """Note an order that reaches a set; the number of sets then."""
    mask = sets.mask[at] | (np.int64(1) << op)
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
def _fill_sets(words: _Words, sets: _Sets, limit: int) -> int:
    """Fill in all sets, layer by layer. Returns the number of the full set, -1 where no order is
    below ``limit``, or -2 where there are too many sets."""
    num_ops = len(words.before)
    full = (np.int64(1) << num_ops) - 1
    count, at = 1, 0
    while at < count:
        mask = sets.mask[at]
        if mask == full:
            return at
        if count + num_ops >= len(sets.mask):
            return -2
        free = -1
        for op in range(num_ops):
            if mask >> op & 1 == 0 and words.before[op] & ~mask == 0:
                gives = _released(words, mask, op) - words.taken[op]
                if gives >= 0 and sets.held[at] + words.taken[op] <= sets.peak[at]:
                    free = op
                    break
        for op in range(num_ops):
            if mask >> op & 1 or words.before[op] & ~mask or (free >= 0 and op != free):
                continue
            most = sets.held[at] + words.taken[op]
            if most < limit:
                held = most - _released(words, mask, op)
                count = _reach_set(sets, count, at, op, max(sets.peak[at], most), held)
        at += 1
    return -1


def exact_order(storages: Storages, found: Found) -> tuple[Found, bool]:
    """Return the best order and True where the graph is small enough, else the one given."""
    if storages.num_ops > MAX_OPS:
        return found, False
    columns = [zeros(MAX_SETS) for _ in range(5)]
    sets = _Sets._make([*columns, np.full(_SLOTS, -1, dtype=np.int64)])
    last = _fill_sets(_words(storages), sets, found.peak_bytes)
    if last < 0:
        return found, last == -1
    order: list[int] = []
    peak = int(sets.peak[last])
    while last > 0:
        order.append(int(sets.op[last]))
        last = int(sets.parent[last])
    return Found(peak, np.array(order[::-1], dtype=np.int64)), True


def _words(storages: Storages) -> _Words:
    direction, bit = storages.forwards, np.int64(1) << np.arange(storages.num_ops, dtype=np.int64)
    before = zeros(storages.num_ops)
    np.bitwise_or.at(before, storages.after, bit[storages.before])
    readers = np.where(storages.is_kept, np.int64(1) << 62, np.int64(0))
    storage = np.repeat(np.arange(len(readers)), np.diff(storages.reader_ptr))
    np.bitwise_or.at(readers, storage, bit[storages.readers])
    taken = storages.passing_bytes.copy()
    np.add.at(taken, storages.producer, storages.num_bytes)
    return _Words(
        before, taken, storages.passing_bytes.copy(), direction.close_ptr.copy(),
        direction.closes.copy(), readers, storages.num_bytes.copy(),
    )  # fmt: skip


# Demand-driven emission: compute what the next result needs, and nothing before it is needed.
#
# The ops that nobody waits for are taken in the graph's order or against it, and each is preceded
# by what it still misses, depth first. Of what one op misses, that goes first whose making holds
# most beyond its result (Sethi and Ullman, 1970, with bytes for registers): so a sum over many
# steps adds each part as it is made, and chains of different layers are not mixed. Exact on trees,
# a good start elsewhere. O(ops + precedences · log).

_ZERO = cast(int, np.int64(0))
"""For a plain 0 as argument the compiler would make a further version of a function."""


class _Needs(NamedTuple):
    result_bytes: LongArray
    """Per op: what is held of it when it has run."""
    most_bytes: LongArray
    """Per op: what is held at most while it and all that it needs are made, nothing shared."""
    before: LongArray
    """As `Direction.before`, in the order in which they are made."""
    queue: LongArray
    heap: Heaps


@kernel
def _fill_needs(direction: Direction, waits: LongArray, needs: _Needs) -> None:
    last = 0
    for op in range(len(waits)):
        if waits[op] == 0:
            needs.queue[last] = op
            last += 1
    first = 0
    while first < last:
        op = needs.queue[first]
        first += 1
        for at in range(direction.before_ptr[op], direction.before_ptr[op + 1]):
            other = direction.before[at]
            beyond = needs.most_bytes[other] - needs.result_bytes[other]
            push(needs.heap, _ZERO, -float(beyond), other)
        held, most = 0, 0
        for at in range(direction.before_ptr[op], direction.before_ptr[op + 1]):
            other = pop(needs.heap, _ZERO)
            needs.before[at] = other
            most = max(most, held + needs.most_bytes[other])
            held += needs.result_bytes[other]
        needs.most_bytes[op] = max(most, held + needs.most_bytes[op])
        for at in range(direction.after_ptr[op], direction.after_ptr[op + 1]):
            waits[direction.after[at]] -= 1
            if waits[direction.after[at]] == 0:
                needs.queue[last] = direction.after[at]
                last += 1


@kernel
def _emit(
    direction: Direction,
    before: LongArray,
    roots: LongArray,
    has_run: BoolArray,
    stack: LongArray,
    place: LongArray,
    order: LongArray,
) -> None:
    count = 0
    for root in roots:
        depth = 0
        stack[0] = root
        place[0] = direction.before_ptr[root]
        while depth >= 0:
            op = stack[depth]
            if place[depth] < direction.before_ptr[op + 1]:
                other = before[place[depth]]
                place[depth] += 1
                if not has_run[other]:
                    depth += 1
                    stack[depth] = other
                    place[depth] = direction.before_ptr[other]
                continue
            depth -= 1
            if not has_run[op]:
                has_run[op] = True
                order[count] = op
                count += 1


def demand_order(storages: Storages, *, last_first: bool) -> LongArray:
    """All ops, each as late as the results before it allow, these in order or backwards."""
    direction, num_ops = storages.forwards, storages.num_ops
    made = zeros(num_ops)
    np.add.at(made, storages.producer, storages.num_bytes)
    read = zeros(num_ops)
    reader_of = storages.readers
    np.maximum.at(read, reader_of, np.repeat(storages.num_bytes, np.diff(storages.reader_ptr)))
    needs = _Needs(
        # A view makes nothing, but what it looks at is held for its readers.
        result_bytes=np.where(made > 0, made, read),
        most_bytes=made + storages.passing_bytes,
        before=zeros(len(direction.before)),
        queue=zeros(num_ops),
        heap=new_heaps(np.array([0, int(np.diff(direction.before_ptr).max(initial=0)) + 1])),
    )
    _fill_needs(direction, direction.num_waits.copy(), needs)
    roots = np.flatnonzero(np.diff(direction.after_ptr) == 0)
    roots = np.ascontiguousarray(roots[::-1]) if last_first else roots
    order, has_run = zeros(num_ops), np.zeros(num_ops, dtype=np.bool_)
    _emit(direction, needs.before, roots, has_run, zeros(num_ops), zeros(num_ops), order)
    return order


_CUT_OPS = 3_000_000
"""Ops that all cuts of one search go through together, about."""
_MIN_EFFORT, _MAX_EFFORT = 250, 4_000
_SHARES = (0.0, 0.3, 0.6, 0.9)
"""Targets between the bound and the present peak."""
_MAX_CUTS = 24
"""Cuts that are computed for one order."""
_STRETCHES = 12
"""Parts of an order; the cuts at the fullest op of each are computed first."""
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class OrderBound:
    """Peak of an order and a lower bound for all orders; both with what exists before the step."""

    peak_bytes: int
    start_bytes: int
    """Bytes that exist before the step."""
    bound_bytes: int
    """No order has a lower peak."""

    @property
    def gap(self) -> float:
        """Share by which the bytes of the order are above the bound, without what exists before."""
        bound = self.bound_bytes - self.start_bytes
        return (self.peak_bytes - self.bound_bytes) / bound if bound else 0.0


def memory_order(graph: Graph) -> IntArray:
    """Return the ops in an order that holds few bytes at once, on one device."""
    return bounded_order(graph)[0]


def bounded_order(graph: Graph) -> tuple[IntArray, OrderBound]:
    """Return such an order, and how far from the best one it can be."""
    storages = storages_of(graph)
    found, bound_bytes = search(storages)
    return found.order.astype(np.int32), bound_of(storages, found.peak_bytes, bound_bytes)


def order_bound(graph: Graph, order: IntArray) -> OrderBound:
    """Return how far from the best order a given one can be."""
    storages = storages_of(graph)
    return bound_of(storages, peak_bytes(storages, order.astype(np.int64)), search(storages)[1])


def bound_of(storages: Storages, peak: int, bound_bytes: int) -> OrderBound:
    """Add what exists before the step, and what stays to its end."""
    kept = int(storages.num_bytes[storages.is_kept].sum())
    return OrderBound(
        peak_bytes=storages.start_bytes + peak,
        start_bytes=storages.start_bytes,
        bound_bytes=storages.start_bytes + max(kept, bound_bytes),
    )


def search(storages: Storages) -> tuple[Found, int]:
    """Return the best order that the portfolio finds, and bytes that every order holds."""
    effort = _effort(storages)
    given = np.arange(storages.num_ops, dtype=np.int64)
    if np.any(storages.before >= storages.after):  # precedences besides those of the graph
        given = legal(storages, given)
    found = Found(peak_bytes(storages, given), given)
    if storages.num_ops == 0 or found.peak_bytes == 0:
        return found, 0
    demanded = (demand_order(storages, last_first=backwards) for backwards in (False, True))
    for base, reach in product((given, *demanded), (SHORT_REACH, LONG_REACH)):
        # A target that the next walk has to beat: one that is too low would forbid to run ahead.
        now = hoisted_both_directions(storages, base, found.peak_bytes - 1, effort, reach)
        found = min(found, now, key=lambda each: each.peak_bytes)
    return _refined(storages, found, effort) if found.peak_bytes else (found, 0)


def _refined(storages: Storages, found: Found, effort: WorkLeft) -> tuple[Found, int]:
    """Refine the order as far as its bound leaves a gap."""
    bound = 0
    for _ in range(_ROUNDS):
        before = found.peak_bytes
        bound = max(bound, _largest_cut(storages, found.order))
        found = _squeezed(storages, found, bound, effort)
        for share in _SHARES:
            target = bound + int(share * (found.peak_bytes - bound))
            found = refined(storages, found, target, effort)
        if found.peak_bytes in (bound, before):
            break
    if found.peak_bytes > bound:
        found, is_best = exact_order(storages, found)
        bound = found.peak_bytes if is_best else max(bound, _largest_cut(storages, found.order))
    return found, bound


def _squeezed(storages: Storages, found: Found, bound: int, effort: WorkLeft) -> Found:
    """Walk again under lower targets as long as one of them helps."""
    best = found
    for share in _SHARES:
        target = bound + int(share * (best.peak_bytes - bound))
        now = hoisted_both_directions(storages, best.order, target, effort)
        best = min(best, now, key=lambda each: each.peak_bytes)
    return best if best.peak_bytes == found.peak_bytes else _squeezed(storages, best, bound, effort)


def _effort(storages: Storages) -> WorkLeft:
    cuts = _CUT_OPS // max(storages.num_ops, 1)
    return WorkLeft(min(max(cuts, _MIN_EFFORT), _MAX_EFFORT))


def _largest_cut(storages: Storages, order: LongArray) -> int:
    """Return the largest cut of the ops at which an order holds most; `_MAX_CUTS` end the search.

    The op of each stretch that holds most is cut first: an order that is bad in one place says
    little about where the best one peaks.
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
