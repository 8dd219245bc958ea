"""Units of ops that grow by joining, with the sums that caps are put on.

A forest over the ops: the root of an op's tree is its unit, and holds the seconds and bytes of all
ops of the unit. Joining is union by smaller op with path halving, near O(1) each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.coarsen.ties import Ties
from hocket.kernels.containers import table

NO_SECONDS_CAP = float("inf")
NO_BYTES_CAP = 2**62


class UnitForest(NamedTuple):
    """The forest; the sums count at roots."""

    parent: LongArray
    seconds: FloatArray
    num_bytes: LongArray


class Readers(NamedTuple):
    """Who reads what each op makes, as compiled code looks at it."""

    made_ptr: LongArray
    user_ptr: LongArray
    users: LongArray


def single_units(op_s: FloatArray, op_bytes: LongArray) -> UnitForest:
    """Every op a unit of its own."""
    return UnitForest(np.arange(len(op_s), dtype=np.int64), op_s.copy(), op_bytes.copy())


def join(
    units: UnitForest, ties: Ties, max_s: float = NO_SECONDS_CAP, max_bytes: int = NO_BYTES_CAP
) -> int:
    """Join the ops of each tie while the result stays under the caps; how many were joined."""
    if not len(ties.first):
        return 0
    from hocket.graph.coarsen.unit_kernels import join_ties

    first, second = table(ties.first, np.int64), table(ties.second, np.int64)
    return join_ties(units, first, second, float(max_s), int(max_bytes))


def joined(count: int, *ties: Ties) -> IntArray:
    """The set of each of ``count`` things when all ties are joined, numbered by first members."""
    units = single_units(np.zeros(count), np.zeros(count, dtype=np.int64))
    for pairs in ties:
        join(units, pairs)
    return numbered(units)


def numbered(units: UnitForest) -> IntArray:
    """The unit of each op, numbered by the first op of each unit."""
    root = units.parent.copy()
    while not np.array_equal(further := root[root], root):
        root = further
    # The smaller op is always the root, so roots ascend as first ops do.
    is_root = root == np.arange(len(root))
    number = np.cumsum(is_root) - 1
    return number[root].astype(np.int32)
