"""Units of ops that grow by joining, with the sums to which caps apply.

A union-find forest over the ops: the root of a tree identifies the unit and holds the seconds and
bytes of all its ops. The smaller op becomes the root, with path halving; a join takes near O(1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.coarsen.ties import Ties
from hocket.kernels import kernel
from hocket.kernels.containers import table


@kernel
def _root(parent: LongArray, op: int) -> int:
    while parent[op] != op:
        # Path halving: every visited op skips its parent.
        parent[op] = parent[parent[op]]
        op = parent[op]
    return op


@kernel
def join_ties(
    units: UnitForest, first: LongArray, second: LongArray, max_s: float, max_bytes: int
) -> int:
    """Join the units of each pair while the result stays within both caps; returns the count."""
    num_joined = 0
    for index in range(len(first)):
        one, other = _root(units.parent, first[index]), _root(units.parent, second[index])
        if one == other:
            continue
        seconds = units.seconds[one] + units.seconds[other]
        num_bytes = units.num_bytes[one] + units.num_bytes[other]
        if seconds > max_s or num_bytes > max_bytes:
            continue
        # The smaller op is the root, so that units are numbered by first ops (`numbered`).
        root = min(one, other)
        units.parent[max(one, other)] = root
        units.seconds[root] = seconds
        units.num_bytes[root] = num_bytes
        num_joined += 1
    return num_joined


@kernel
def find_sole_readers(units: UnitForest, readers: Readers, found: LongArray) -> None:
    """Fill ``found[op]``: root of the only other unit that reads the op's results, or -1."""
    for op in range(len(found)):
        own, sole, num_units = _root(units.parent, op), -1, 0
        start = readers.user_ptr[readers.made_ptr[op]]
        stop = readers.user_ptr[readers.made_ptr[op + 1]]
        for index in range(start, stop):
            unit = _root(units.parent, readers.users[index])
            # Only one other unit counts, so two different ones are enough to know.
            if unit != own and unit != sole:
                num_units += 1
                sole = unit
        found[op] = sole if num_units == 1 else -1


NO_SECONDS_CAP = float("inf")
NO_BYTES_CAP = 2**62


class UnitForest(NamedTuple):
    """The union-find forest; the sums are valid at roots."""

    parent: LongArray
    seconds: FloatArray
    num_bytes: LongArray


class Readers(NamedTuple):
    """Readers of each op's results, as arrays for compiled code."""

    made_ptr: LongArray
    user_ptr: LongArray
    users: LongArray


def single_units(op_s: FloatArray, op_bytes: LongArray) -> UnitForest:
    """Return a forest in which every op is its own unit."""
    return UnitForest(np.arange(len(op_s), dtype=np.int64), op_s.copy(), op_bytes.copy())


def join(
    units: UnitForest, ties: Ties, max_s: float = NO_SECONDS_CAP, max_bytes: int = NO_BYTES_CAP
) -> int:
    """Join the ops of each tie while the result stays within the caps; returns the count."""
    if not len(ties.first):
        return 0

    first, second = table(ties.first, np.int64), table(ties.second, np.int64)
    return join_ties(units, first, second, float(max_s), int(max_bytes))


def joined(count: int, *ties: Ties) -> IntArray:
    """Join all ties; per item the number of its set, numbered by first members."""
    units = single_units(np.zeros(count), np.zeros(count, dtype=np.int64))
    for pairs in ties:
        join(units, pairs)
    return numbered(units)


def numbered(units: UnitForest) -> IntArray:
    """Per op: its unit, numbered by the first op of each unit."""
    root = units.parent.copy()
    while not np.array_equal(further := root[root], root):
        root = further
    # The smaller op is always the root, so roots ascend as first ops do.
    is_root = root == np.arange(len(root))
    number = np.cumsum(is_root) - 1
    return number[root].astype(np.int32)
