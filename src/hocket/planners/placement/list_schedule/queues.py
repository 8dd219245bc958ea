"""Heaps that know where each op is, so that a key can be set again and an op taken out.

Every device has four (`state.LATER` and so on); O(log n) per change, ties by rank.
"""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.placement.list_schedule.state import (
    ARRIVED,
    DUE,
    LATER,
    NUM_HEAPS,
    PARKED,
    Queues,
)


@kernel
def _set(queues: Queues, base: int, place: int, device: int, key: float, op: int) -> None:
    entry = queues.entries[base + place // NUM_HEAPS]
    entry.key = key
    entry.op = op
    queues.where[op, device] = place


@kernel
def _rise(queues: Queues, base: int, place: int, device: int, key: float, op: int) -> None:
    """Put an entry at a free place or above, where it belongs."""
    at, heap = place // NUM_HEAPS, place % NUM_HEAPS
    while at > 0:
        above = (at - 1) >> 1
        other = queues.entries[base + above]
        if other.key < key or (other.key == key and other.op < op):
            break
        _set(queues, base, at * NUM_HEAPS + heap, device, other.key, other.op)
        at = above
    _set(queues, base, at * NUM_HEAPS + heap, device, key, op)


@kernel
def _sink(
    queues: Queues, base: int, size: int, place: int, device: int, key: float, op: int
) -> None:
    """Put an entry at a free place or below, where it belongs."""
    at, heap = place // NUM_HEAPS, place % NUM_HEAPS
    while 2 * at + 1 < size:
        below = 2 * at + 1
        other = queues.entries[base + below]
        if below + 1 < size:
            right = queues.entries[base + below + 1]
            if right.key < other.key or (right.key == other.key and right.op < other.op):
                below += 1
                other = right
        if key < other.key or (key == other.key and op < other.op):
            break
        _set(queues, base, at * NUM_HEAPS + heap, device, other.key, other.op)
        at = below
    _set(queues, base, at * NUM_HEAPS + heap, device, key, op)


@kernel
def _insert(queues: Queues, device: int, heap: int, key: float, op: int) -> None:
    number = device * NUM_HEAPS + heap
    place = queues.size[number] * NUM_HEAPS + heap
    queues.size[number] += 1
    _rise(queues, number * queues.where.shape[0], place, device, key, op)


@kernel
def remove(queues: Queues, device: int, op: int) -> None:
    """Take an op out of whichever of the device's heaps it is in."""
    place = queues.where[op, device] + 0
    if place < 0:
        return
    queues.where[op, device] = -1
    number = device * NUM_HEAPS + place % NUM_HEAPS
    queues.size[number] -= 1
    size = queues.size[number]
    if place // NUM_HEAPS == size:
        return
    base = number * queues.where.shape[0]
    old = queues.entries[base + place // NUM_HEAPS]
    last = queues.entries[base + size]
    if last.key < old.key or (last.key == old.key and last.op < op):
        _rise(queues, base, place, device, last.key, last.op)
    else:
        _sink(queues, base, size, place, device, last.key, last.op)


@kernel
def move(queues: Queues, device: int, heap: int, key: float, op: int) -> None:
    """Put an op into one of the device's heaps, out of whichever it is in."""
    place, number = queues.where[op, device] + 0, device * NUM_HEAPS + heap
    if place < 0 or place % NUM_HEAPS != heap:
        remove(queues, device, op)
        _insert(queues, device, heap, key, op)
        return
    base = number * queues.where.shape[0]
    if key < queues.entries[base + place // NUM_HEAPS].key:
        _rise(queues, base, place, device, key, op)
    else:
        _sink(queues, base, queues.size[number], place, device, key, op)


@kernel
def num_in(queues: Queues, device: int, heap: int) -> int:
    """How many ops are in a heap."""
    count: int = queues.size[device * NUM_HEAPS + heap]
    return count


@kernel
def op_at(queues: Queues, device: int, heap: int, at: int) -> int:
    """The op at a position of a heap; the first has the smallest (key, rank)."""
    number = device * NUM_HEAPS + heap
    op: int = queues.entries[number * queues.where.shape[0] + at].op
    return op


@kernel
def top_key(queues: Queues, device: int, heap: int) -> float:
    """The smallest key of a heap; infinite where it is empty."""
    number = device * NUM_HEAPS + heap
    if queues.size[number] == 0:
        return np.inf
    key: float = queues.entries[number * queues.where.shape[0]].key
    return key


@kernel
def has_work(queues: Queues, device: int, now: float) -> bool:
    """Whether the device may have something to offer by now."""
    number = device * NUM_HEAPS
    if queues.size[number + ARRIVED] + queues.size[number + DUE] + queues.size[number + PARKED] > 0:
        return True
    return top_key(queues, device, LATER) <= now
