"""Longest paths through the ops, compiled: top levels, bottom levels and reverse depths.

A top level is the length of the longest path that ends where an op begins, a bottom level that of
the longest path that begins with the op. Ops stand in topological order, so one pass each.
O(ops + edges).
"""

from __future__ import annotations

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.planners.placement.pardnn.work import UnitWork


@kernel
def top_levels(work: UnitWork, place: LongArray, top_s: FloatArray) -> None:
    """Fill ``top_s``; edges inside one place (not -1) cost nothing."""
    for op in range(len(top_s)):
        longest_s = 0.0
        for edge in range(work.parent_ptr[op], work.parent_ptr[op + 1]):
            parent = work.parent[edge]
            length_s = top_s[parent] + work.op_s[parent]
            if place[parent] < 0 or place[parent] != place[op]:
                length_s += work.parent_s[edge]
            longest_s = max(longest_s, length_s)
        top_s[op] = longest_s


@kernel
def bottom_levels(work: UnitWork, place: LongArray, bottom_s: FloatArray) -> None:
    """Fill ``bottom_s``; edges inside one place (not -1) cost nothing."""
    for op in range(len(bottom_s) - 1, -1, -1):
        longest_s = 0.0
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            child = work.child[edge]
            length_s = bottom_s[child]
            if place[child] < 0 or place[child] != place[op]:
                length_s += work.child_s[edge]
            longest_s = max(longest_s, length_s)
        bottom_s[op] = longest_s + work.op_s[op]


@kernel
def reverse_depths(work: UnitWork, depth: LongArray) -> None:
    """Fill ``depth`` with the most edges on a path from each op to an op without children."""
    for op in range(len(depth) - 1, -1, -1):
        deepest = -1
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            deepest = max(deepest, depth[work.child[edge]])
        depth[op] = deepest + 1
