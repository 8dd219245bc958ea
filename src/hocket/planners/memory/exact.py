"""The best order of a small graph, by dynamic programming over the sets of ops that have run.

A set is a word of bits; for each one the least peak of the ways to it is kept, layer by layer of
equal size. Sets whose peak is no better than a known order are dropped, and where an op can run
under the peak so far that takes no more than it gives back, nothing else is tried: running it at
once never hurts (the bytes of sets are submodular). O(sets · ops), at most `MAX_SETS`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.memory.refine import Found
from hocket.planners.memory.storages import Storages

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
    """Note a way to a set; how many sets there are then."""
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
    """All sets in layers; the number of the full one, -1 where no order is below ``limit``, or -2
    where there were too many sets."""
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
    ways, bit = storages.forwards, np.int64(1) << np.arange(storages.num_ops, dtype=np.int64)
    before = zeros(storages.num_ops)
    np.bitwise_or.at(before, storages.after, bit[storages.before])
    readers = np.where(storages.is_kept, np.int64(1) << 62, np.int64(0))
    storage = np.repeat(np.arange(len(readers)), np.diff(storages.reader_ptr))
    np.bitwise_or.at(readers, storage, bit[storages.readers])
    taken = storages.passing_bytes.copy()
    np.add.at(taken, storages.producer, storages.num_bytes)
    return _Words(
        before, taken, storages.passing_bytes.copy(), ways.close_ptr.copy(), ways.closes.copy(),
        readers, storages.num_bytes.copy(),
    )  # fmt: skip
