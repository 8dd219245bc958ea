"""Longest paths through the ops: top levels, bottom levels and reverse depths.

A top level is the length of the longest path that ends where an op begins, a bottom level the
length of the longest path that begins with the op. Edges between ops with the same ``place`` (a
path or a device; -1 for none) cost nothing. O(ops + edges).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.planners.placement.pardnn.unit_work import UnitWork
from hocket.planners.shared import longest_from_start, longest_to_end


def top_levels(work: UnitWork, place: LongArray) -> FloatArray:
    """Per op: its top level."""
    top_s = np.zeros(len(work.op_s))
    longest_from_start(work.child_ptr, work.child, _sent_s(work, place), work.op_s, top_s)
    return top_s


def bottom_levels(work: UnitWork, place: LongArray) -> FloatArray:
    """Per op: its bottom level."""
    bottom_s = np.zeros(len(work.op_s))
    longest_to_end(work.child_ptr, work.child, _sent_s(work, place), work.op_s, bottom_s)
    return bottom_s


def _sent_s(work: UnitWork, place: LongArray) -> FloatArray:
    src = np.repeat(place, np.diff(work.child_ptr))
    return np.where((src < 0) | (src != place[work.child]), work.child_s, 0.0)


@kernel
def reverse_depths(work: UnitWork, depth: LongArray) -> None:
    """Fill ``depth`` with the maximum number of edges from each op to an op without children."""
    for op in range(len(depth) - 1, -1, -1):
        deepest = -1
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            deepest = max(deepest, depth[work.child[edge]])
        depth[op] = deepest + 1
