"""ParDNN step 1a, slicing: cut the graph into paths, one heavy path per device first.

Each of the first K paths begins at the op with the largest bottom level among the remaining ops and
continues to the child with the longest remaining path, communication included: these primary paths
contain the heaviest transfers. Then edges within them cost nothing, and secondary paths start at
the remaining ops in order of the longest path through them, and continue the same way until no free
child is left. An op puts the other ops of its unit on its path. O(K · (ops + edges) + ops log ops).

Qararyah et al., "A computational-graph partitioning method for training memory-constrained DNNs",
Parallel Computing 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.placement.pardnn.unit_work import (
    UnitWork,
    bottom_levels,
    reverse_depths,
    top_levels,
)


class Slices(NamedTuple):
    """Paths, the primary ones first, together with the other ops of their units."""

    path: LongArray
    """Per op: its path."""
    is_trunk: BoolArray
    """True if the op itself is on the path; False if only another op of its unit is."""
    head: LongArray
    tail: LongArray
    """Per path: its first and its last op."""
    num_primary: int
    top_s: FloatArray
    """Top level of each op, without edges inside primary paths: its position in time."""

    @property
    def num_paths(self) -> int:
        """Number of paths."""
        return len(self.head)


class _Cut(NamedTuple):
    """The paths found so far."""

    path: LongArray
    is_trunk: BoolArray
    head: LongArray
    tail: LongArray
    num_paths: LongArray


def slice_paths(work: UnitWork, num_primary: int) -> Slices:
    """Cut the graph into at most ``num_primary`` primary paths and as many secondary as needed."""
    num_ops = len(work.op_s)
    cut = _Cut(
        path=np.full(num_ops, -1, dtype=np.int64),
        is_trunk=np.zeros(num_ops, dtype=np.bool_),
        head=zeros(num_ops),
        tail=zeros(num_ops),
        num_paths=zeros(1),
    )
    depth = zeros(num_ops)
    _cut_primary(work, cut, num_primary, np.zeros(num_ops))
    found = int(cut.num_paths[0])
    place = cut.path.copy()
    top_s, bottom_s = top_levels(work, place), bottom_levels(work, place)
    reverse_depths(work, depth)
    order = np.lexsort((np.arange(num_ops), -depth, -(top_s + bottom_s)))
    _cut_secondary(work, cut, order, bottom_s)
    num_paths = int(cut.num_paths[0])
    return Slices(
        path=cut.path,
        is_trunk=cut.is_trunk,
        head=cut.head[:num_paths],
        tail=cut.tail[:num_paths],
        num_primary=found,
        top_s=top_s,
    )


@kernel
def _take(work: UnitWork, cut: _Cut, op: int, path: int) -> None:
    """Put an op on a path, together with the other ops of its unit."""
    cut.is_trunk[op] = True
    unit = work.units.of[op]
    for index in range(work.units.ptr[unit], work.units.ptr[unit + 1]):
        cut.path[work.units.ops[index]] = path


@kernel
def _follow(work: UnitWork, cut: _Cut, head: int, bottom_s: FloatArray) -> None:
    """Add a path from ``head`` along the longest remaining path, over ops not on other paths."""
    path = cut.num_paths[0]
    cut.num_paths[0] += 1
    cut.head[path] = head
    op = head
    while op >= 0:
        _take(work, cut, op, path)
        cut.tail[path] = op
        following, longest_s = -1, -1.0
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            child = work.child[edge]
            length_s = work.child_s[edge] + bottom_s[child]
            # A child may be on this path already, because another op of its unit is.
            if length_s > longest_s and (cut.path[child] < 0 or cut.path[child] == path):
                following, longest_s = child, length_s
        op = following


@kernel
def _lengthen(work: UnitWork, cut: _Cut, bottom_s: FloatArray) -> int:
    """Update bottom levels of ops without a path; returns the op with the largest, or -1."""
    head, longest_s = -1, -1.0
    for op in range(len(bottom_s) - 1, -1, -1):
        if cut.path[op] >= 0:
            continue
        rest_s = 0.0
        for edge in range(work.child_ptr[op], work.child_ptr[op + 1]):
            child = work.child[edge]
            if cut.path[child] < 0:
                rest_s = max(rest_s, work.child_s[edge] + bottom_s[child])
        bottom_s[op] = rest_s + work.op_s[op]
        # Ops are walked backward, so ties go to the op with the smallest number.
        if bottom_s[op] >= longest_s:
            head, longest_s = op, bottom_s[op]
    return head


@kernel
def _cut_primary(work: UnitWork, cut: _Cut, num_primary: int, bottom_s: FloatArray) -> None:
    for _ in range(num_primary):
        head = _lengthen(work, cut, bottom_s)
        if head < 0:
            break
        _follow(work, cut, head, bottom_s)


@kernel
def _cut_secondary(work: UnitWork, cut: _Cut, order: LongArray, bottom_s: FloatArray) -> None:
    for op in order:
        if cut.path[op] < 0:
            _follow(work, cut, op, bottom_s)
