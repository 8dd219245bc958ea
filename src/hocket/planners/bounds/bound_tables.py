"""Arrays on which the compiled bounds work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels.containers import Heaps, new_heaps, zeros

MAX_TOGETHER = 64
"""Limit on ops put on one device with an op to prove that it starts later."""
MIN_TOGETHER = 8
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
