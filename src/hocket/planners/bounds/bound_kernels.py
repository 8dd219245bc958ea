"""Compiled lower bounds: earliest starts (`find_heads`) and windows (`find_windows`).

`step_bound` states the ideas and proofs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import ZERO, Heaps, new_heaps, zeros
from hocket.kernels.heaps import pop, push

# Arrays on which the compiled bounds work.


MAX_TOGETHER = 64
"""Limit on ops put on one device with an op to prove that it starts later."""
MIN_TOGETHER = 8
"""Least limit on ops put together, however large the graph."""
TOTAL_TOGETHER = 4_000_000
"""Limit on `MAX_TOGETHER` summed over all ops, so that large graphs take linear time."""


class Sides(NamedTuple):
    """Neighbours before each op: its predecessors, or in the reversed graph its successors."""

    ptr: LongArray
    op: LongArray
    """Neighbours of op i: ``op[ptr[i]:ptr[i + 1]]``, one entry per tensor between them."""
    work: FloatArray
    """Per entry of ``op``: work of transferring the tensor (bytes, or stated seconds)."""
    least_s: FloatArray
    """Per entry of ``op``: least seconds of transferring the tensor between any two devices."""
    latency_s: FloatArray
    """[class of the neighbour, class of the op]: least latency."""
    unit_s: FloatArray
    op_s: FloatArray
    """Per op: the time on its fastest device."""
    unit: LongArray
    """Per op: its unit; ops of one unit share a device."""
    end_s: FloatArray
    """Per op: earliest end on any class, filled as ops are processed."""


class Together(NamedTuple):
    """Ops assumed to be on one device, and a queue of ops that may have to join them."""

    start_s: FloatArray
    """Earliest starts, ascending, of the ops on the device."""
    seconds: FloatArray
    size: LongArray
    mark: LongArray
    """Per op: number of the search that last put it on the device."""
    heaps: Heaps
    """A heap of queued ops (slots), largest bound first."""
    slot_op: LongArray
    slot_bound_s: FloatArray
    slot_transfer_s: FloatArray
    slot_between_s: FloatArray
    num_slots: LongArray


class SegmentTree(NamedTuple):
    """A complete binary tree over the ops of a set; the root has index 1."""

    work_s: FloatArray
    best_s: FloatArray


def new_together(num_ops: int, max_neighbours: int) -> Together:
    """Allocate arrays for one search at a time; ops beyond their size only weaken the bound."""
    size = int(np.clip(TOTAL_TOGETHER // max(num_ops, 1), MIN_TOGETHER, MAX_TOGETHER))
    # An op that finds no slot is not queued, which only weakens the bound.
    num_slots = max_neighbours + 32 * size
    return Together(
        start_s=np.zeros(size),
        seconds=np.zeros(size),
        size=zeros(1),
        mark=np.full(num_ops, -1, dtype=np.int64),
        heaps=new_heaps(np.array([0, num_slots], dtype=np.int64)),
        slot_op=zeros(num_slots),
        slot_bound_s=np.zeros(num_slots),
        slot_transfer_s=np.zeros(num_slots),
        slot_between_s=np.zeros(num_slots),
        num_slots=zeros(1),
    )


def new_tree(num_ops: int) -> SegmentTree:
    """Allocate a tree for sets of up to ``num_ops`` ops."""
    width = 1 << max(num_ops - 1, 0).bit_length()
    return SegmentTree(work_s=np.zeros(2 * width), best_s=np.zeros(2 * width))


@kernel
def _remote_s(sides: Sides, end_s: FloatArray, op: int, edge: int, where: int) -> float:
    """Earliest arrival of a tensor from another device, on a device of class ``where``."""
    earliest = np.inf
    # Ops of one unit are never on different devices, so the tensor never arrives from elsewhere.
    if sides.unit[sides.op[edge]] == sides.unit[op]:
        return earliest
    for other in range(len(end_s)):
        arrival = end_s[other, sides.op[edge]] + sides.latency_s[other, where]
        arrival += sides.work[edge] * sides.unit_s[other, where]
        earliest = min(earliest, arrival)
    return earliest


@kernel
def _add(together: Together, start_s: float, seconds: float) -> float:
    """Put one more op on the device; returns the earliest end of all ops there."""
    at = together.size[0]
    together.size[0] += 1
    while at > 0 and together.start_s[at - 1] > start_s:
        together.start_s[at] = together.start_s[at - 1]
        together.seconds[at] = together.seconds[at - 1]
        at -= 1
    together.start_s[at], together.seconds[at] = start_s, seconds
    end_s = 0.0
    for index in range(together.size[0]):
        end_s = max(end_s, together.start_s[index]) + together.seconds[index]
    return end_s


@kernel
def _offer(
    together: Together, op: int, bound_s: float, least_transfer_s: float, between_s: float
) -> None:
    """Queue an op that must be on the same device if the start is to be before ``bound_s``."""
    # Dropping an op makes the bound smaller, never wrong.
    slot = together.num_slots[0]
    if slot == len(together.slot_op):
        return
    together.num_slots[0] += 1
    together.slot_op[slot] = op
    together.slot_bound_s[slot] = bound_s
    together.slot_transfer_s[slot] = least_transfer_s
    together.slot_between_s[slot] = between_s
    # The heap pops the smallest key first, hence the sign.
    push(together.heaps, ZERO, -bound_s, slot)


@kernel
def _offer_parents(
    sides: Sides, together: Together, end_s: FloatArray, op: int, where: int
) -> float:
    """Queue the direct predecessors of an op; returns its earliest start without contention."""
    floor_s = 0.0
    for edge in range(sides.ptr[op], sides.ptr[op + 1]):
        parent = sides.op[edge]
        remote_s = _remote_s(sides, end_s, op, edge, where)
        floor_s = max(floor_s, min(remote_s, end_s[where, parent]))
    for edge in range(sides.ptr[op], sides.ptr[op + 1]):
        parent = sides.op[edge]
        remote_s = _remote_s(sides, end_s, op, edge, where)
        if remote_s > floor_s:
            _offer(together, parent, remote_s, sides.least_s[edge], 0.0)
    return floor_s


@kernel
def _offer_ancestors(sides: Sides, together: Together, op: int, slot: int, floor_s: float) -> None:
    """Queue the predecessors of an ancestor, with one transfer on each path to the op."""
    between_s = together.slot_between_s[slot] + sides.op_s[together.slot_op[slot]]
    for edge in range(sides.ptr[together.slot_op[slot]], sides.ptr[together.slot_op[slot] + 1]):
        ancestor = sides.op[edge]
        transfer_s = min(together.slot_transfer_s[slot], sides.least_s[edge])
        bound_s = sides.end_s[ancestor] + transfer_s + between_s
        # Ops of the same unit always have to be on this device.
        if sides.unit[ancestor] == sides.unit[op]:
            bound_s = np.inf
        if bound_s > floor_s:
            _offer(together, ancestor, bound_s, transfer_s, between_s)


@kernel
def _earliest_start_s(
    sides: Sides,
    together: Together,
    start_s: FloatArray,
    end_s: FloatArray,
    op: int,
    where: int,
) -> float:
    together.size[0] = 0
    together.num_slots[0] = 0
    together.heaps.size[0] = 0
    mark = op * len(end_s) + where
    floor_s = _offer_parents(sides, together, end_s, op, where)
    best_s = np.inf
    while True:
        next_s = 0.0
        if together.heaps.size[0] > 0:
            next_s = together.slot_bound_s[together.heaps.item[0]]
        best_s = min(best_s, max(floor_s, next_s))
        if floor_s >= next_s:
            return best_s
        # No space for more ops: what was proven so far still holds.
        if together.size[0] == len(together.start_s):
            return min(best_s, floor_s)
        slot = pop(together.heaps, ZERO)
        ancestor = together.slot_op[slot]
        if together.mark[ancestor] == mark:
            continue
        together.mark[ancestor] = mark
        # The ancestor cannot run on this class, so the op cannot start before the bound found so
        # far.
        if start_s[where, ancestor] == np.inf:
            return best_s
        seconds = end_s[where, ancestor] - start_s[where, ancestor]
        floor_s = max(floor_s, _add(together, start_s[where, ancestor], seconds))
        _offer_ancestors(sides, together, op, slot, floor_s)


@kernel
def find_heads(
    sides: Sides,
    op_s: FloatArray,
    together: Together,
    start_s: FloatArray,
    end_s: FloatArray,
    backwards: bool,
) -> None:
    """Fill the earliest start and end of each op on each class, as [class, op]."""
    num_ops = op_s.shape[1]
    for index in range(num_ops):
        op = num_ops - 1 - index if backwards else index
        for where in range(len(op_s)):
            start_s[where, op], end_s[where, op] = np.inf, np.inf
            if op_s[where, op] < np.inf:
                start_s[where, op] = _earliest_start_s(sides, together, start_s, end_s, op, where)
                end_s[where, op] = start_s[where, op] + op_s[where, op]
            sides.end_s[op] = min(sides.end_s[op], end_s[where, op])


@kernel
def find_windows(
    ptr: LongArray,
    by_head: LongArray,
    leaf: LongArray,
    head_s: FloatArray,
    tail_s: FloatArray,
    work_s: FloatArray,
    tree: SegmentTree,
    longest_s: FloatArray,
) -> None:
    """Per set of ops: maximum of head + work + tail over subsets bounded by head and by tail.

    Ops enter the tree by decreasing head. Over the ops that entered, sorted by tail, the tree keeps
    the work and the largest tail + work.
    """
    for part in range(len(ptr) - 1):
        first, stop = ptr[part], ptr[part + 1]
        width = 1
        # A perfect tree needs a power of two as its width.
        while width < stop - first:
            width *= 2
        for at in range(2 * width):
            tree.work_s[at], tree.best_s[at] = 0.0, -np.inf
        for index in range(first, stop):
            op = by_head[index]
            at = width + leaf[op]
            tree.work_s[at] = work_s[op]
            tree.best_s[at] = work_s[op] + tail_s[op]
            while at > 1:
                at >>= 1
                left, right = 2 * at, 2 * at + 1
                tree.work_s[at] = tree.work_s[left] + tree.work_s[right]
                tree.best_s[at] = max(tree.best_s[right], tree.best_s[left] + tree.work_s[right])
            longest_s[part] = max(longest_s[part], head_s[op] + tree.best_s[1])
