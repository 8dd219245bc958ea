"""The arrays that the compiled bounds work on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels.containers import Heaps, new_heaps, zeros

MAX_TOGETHER = 64
"""Ops that are put on one device with an op to prove its earliest start later."""
MIN_TOGETHER = 8
TOTAL_TOGETHER = 4_000_000
"""Over all ops of a graph: large graphs put fewer ops together, so that time stays linear."""


class Sides(NamedTuple):
    """Neighbours before each op: its predecessors, or its successors in the reversed graph."""

    ptr: LongArray
    op: LongArray
    """Op i has the neighbours ``op[ptr[i]:ptr[i + 1]]``, one for each tensor between them."""
    work: FloatArray
    """Per neighbour: what a transfer of the tensor moves."""
    least_s: FloatArray
    """Per neighbour: the least that a transfer of the tensor takes between any two devices."""
    latency_s: FloatArray
    """[class of the neighbour, class of the op]."""
    unit_s: FloatArray
    op_s: FloatArray
    """Per op: the time on its fastest device."""
    unit: LongArray
    """Per op: ops of one unit share a device."""
    end_s: FloatArray
    """Per op: the earliest end on any class; written as ops are done."""


class Together(NamedTuple):
    """Ops that are taken to sit on one device, and those that may have to join them."""

    start_s: FloatArray
    """Earliest starts, ascending, of the ops on the device."""
    seconds: FloatArray
    size: LongArray
    mark: LongArray
    """Per op: the search that last put it on the device."""
    heaps: Heaps
    """One heap of slots, largest bound first."""
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
    """Scratch arrays for one search at a time; ops beyond their size only weaken the bound."""
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
    """A tree for sets of up to ``num_ops`` ops."""
    width = 1 << max(num_ops - 1, 0).bit_length()
    return SegmentTree(work_s=np.zeros(2 * width), best_s=np.zeros(2 * width))
