"""Addresses for storages whose lifetimes are known: one slab, nothing moves, little is wasted.

Offline best fit (as in Sekiyama et al., 2018, "Profile-guided memory optimization for deep neural
networks"): blocks in falling order of size, each at the lowest end of the smallest gap that fits
between the blocks that live at the same time. Those are found in a tree over the starts that knows
the latest end below each node, so only blocks that do meet are looked at. While the slab is larger
than what lives at once, the block at its top goes to the front of the order and all are placed
again, a counted number of times. O(tries · blocks · (log blocks + m log m)) where m blocks meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from hocket.base.arrays import IntArray, LongArray, positions
from hocket.base.errors import UsageError
from hocket.hardware.allocation import ALIGNMENT_BYTES
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.memory.storages import Storages

_TRIED_BLOCKS, _MAX_TRIES = 40_000, 200
"""Blocks that all further tries place together, about, and how many tries there are at most."""
_ZERO = cast(int, np.int64(0))
"""For a plain 0 as argument the compiler would make a further version of a function."""


class Intervals(NamedTuple):
    """Blocks of memory over time: each from its start to its end, both included."""

    num_bytes: LongArray
    start: LongArray
    end: LongArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Addresses:
    """Where each block begins in a slab."""

    address: LongArray
    slab_bytes: int
    peak_bytes: int
    """The most that lives at once: no slab is smaller."""

    @property
    def waste(self) -> float:
        """Share by which the slab is larger than what lives at once."""
        return self.slab_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0


class _Shelf(NamedTuple):
    """Blocks by their starts, and room for one search."""

    start: LongArray
    end: LongArray
    num_bytes: LongArray
    address: LongArray
    earliest: LongArray
    """Tree of the earliest start; node 1 is the root."""
    latest: LongArray
    """Tree of the latest end among placed blocks."""
    stack: LongArray
    met: LongArray
    """Blocks that meet the one at hand."""
    lies_at: LongArray
    """Their addresses."""


@kernel
def _meeting(shelf: _Shelf, first: int, last: int) -> int:
    """Placed blocks that live at some time from first to last, into ``met``; how many."""
    num_leaves = len(shelf.latest) // 2
    count, size = 0, 1
    shelf.stack[0] = 1
    while size > 0:
        size -= 1
        node = shelf.stack[size]
        if shelf.latest[node] < first or shelf.earliest[node] > last:
            continue
        if node >= num_leaves:
            shelf.met[count] = node - num_leaves
            shelf.lies_at[count] = shelf.address[node - num_leaves]
            count += 1
            continue
        shelf.stack[size] = 2 * node + 1
        shelf.stack[size + 1] = 2 * node
        size += 2
    return count


@kernel
def _sort_by_address(shelf: _Shelf, count: int) -> None:
    """Heap sort of what was met: the lowest address first."""
    met, key = shelf.met, shelf.lies_at
    for begin in range(count // 2 - 1, -1, -1):
        _sift(met, key, begin, count)
    for end in range(count - 1, 0, -1):
        met[0], met[end] = met[end], met[0]
        key[0], key[end] = key[end], key[0]
        _sift(met, key, _ZERO, end)


@kernel
def _sift(met: LongArray, key: LongArray, at: int, count: int) -> None:
    block, value = met[at], key[at]
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and key[child + 1] > key[child]:
            child += 1
        if value >= key[child]:
            break
        met[at], key[at] = met[child], key[child]
        at = child
    met[at], key[at] = block, value


@kernel
def _best_gap(shelf: _Shelf, count: int, num_bytes: int) -> int:
    """The lowest address of the smallest gap that fits among what was met."""
    found, smallest, free = -1, 2**62, 0
    for at in range(count):
        block = shelf.met[at]
        gap = shelf.address[block] - free
        if num_bytes <= gap < smallest:
            found, smallest = free, gap
        free = max(free, shelf.address[block] + shelf.num_bytes[block])
    return found if found >= 0 else free


@kernel
def _place_all(shelf: _Shelf, order: LongArray) -> int:
    """Place blocks one after another; how large the slab is."""
    num_leaves, slab = len(shelf.latest) // 2, 0
    for block in order:
        count = _meeting(shelf, shelf.start[block], shelf.end[block])
        _sort_by_address(shelf, count)
        shelf.address[block] = _best_gap(shelf, count, shelf.num_bytes[block])
        slab = max(slab, shelf.address[block] + shelf.num_bytes[block])
        node = num_leaves + block
        while node > 0:
            shelf.latest[node] = max(shelf.latest[node], shelf.end[block])
            node //= 2
    return slab


def pack(intervals: Intervals) -> Addresses:
    """Addresses such that blocks which live at the same time never overlap."""
    num_bytes, start, end = (np.asarray(column, dtype=np.int64) for column in intervals)
    if np.any(num_bytes < 0) or np.any(end < start):
        raise UsageError("a block has a negative size, or ends before it starts")
    by_start = np.argsort(start, kind="stable")
    num_bytes, start, end = num_bytes[by_start], start[by_start], end[by_start]
    blocks = Intervals(num_bytes, start, end)
    slab, placed = _smallest(blocks, _live_peak(blocks))
    address = zeros(len(start))
    address[by_start] = placed
    return Addresses(address=address, slab_bytes=slab, peak_bytes=_live_peak(blocks))


def _smallest(blocks: Intervals, peak: int) -> tuple[int, LongArray]:
    """The best of several orders, and of what follows from it; slab and addresses."""
    num_bytes, start, end = blocks
    span = end - start + 1
    orders = [
        np.lexsort((start, -span, -num_bytes)),
        np.lexsort((start, -num_bytes * span)),
        np.lexsort((start, -num_bytes, -span)),
    ]
    num_tries = 1 + min(_TRIED_BLOCKS // max(len(start), 1), _MAX_TRIES)
    best = slab, address, order = _placed(blocks, orders[0])
    for turn in range(1, num_tries):
        if best[0] == peak:
            break
        if turn == len(orders):
            slab, address, order = best
        if turn < len(orders):
            order = orders[turn]
        else:
            top = int(np.argmax(address + num_bytes))
            order = np.concatenate(([top], order[order != top]))
        slab, address, order = _placed(blocks, order)
        if slab < best[0]:
            best = slab, address, order
    return best[0], best[1]


def _placed(blocks: Intervals, order: LongArray) -> tuple[int, LongArray, LongArray]:
    shelf = _shelf(blocks)
    return int(_place_all(shelf, order)), shelf.address, order


def lifetimes(
    storages: Storages, order: IntArray, *, alignment: int = ALIGNMENT_BYTES
) -> Intervals:
    """When each storage lives if ops run in ``order``, by positions; sizes are rounded up."""
    position = positions(order)
    end = position[storages.producer].copy()
    storage = np.repeat(np.arange(len(end)), np.diff(storages.reader_ptr))
    np.maximum.at(end, storage, position[storages.readers])
    end[storages.is_kept] = max(storages.num_ops - 1, 0)
    rounded = -(-storages.num_bytes // alignment) * alignment
    return Intervals(rounded, position[storages.producer], end)


def _shelf(blocks: Intervals) -> _Shelf:
    num_bytes, start, end = blocks
    num_leaves = 1
    while num_leaves < len(start):
        num_leaves *= 2
    return _Shelf(
        start=start,
        end=end,
        num_bytes=num_bytes,
        address=zeros(len(start)),
        earliest=_earliest(start, num_leaves),
        latest=np.full(2 * num_leaves, -1, dtype=np.int64),
        stack=zeros(2 * num_leaves + 2),
        met=zeros(len(start)),
        lies_at=zeros(len(start)),
    )


def _earliest(start: LongArray, num_leaves: int) -> LongArray:
    tree = np.full(2 * num_leaves, 2**62, dtype=np.int64)
    tree[num_leaves : num_leaves + len(start)] = start
    first = num_leaves
    while first > 1:
        level = tree[first : 2 * first]
        first //= 2
        tree[first : 2 * first] = np.minimum(level[::2], level[1::2])
    return tree


def _live_peak(blocks: Intervals) -> int:
    num_bytes, start, end = blocks
    times = np.concatenate((start, end + 1))
    changes = np.concatenate((num_bytes, -num_bytes))
    # At one time what ends goes before what begins.
    order = np.lexsort((changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))
