"""Joining units in compiled code. Near O(ties), and O(ops + reads) to find sole readers."""

from __future__ import annotations

from hocket.base.arrays import LongArray
from hocket.graph.coarsen.units import Readers, UnitForest
from hocket.kernels import kernel


@kernel
def _root(parent: LongArray, op: int) -> int:
    while parent[op] != op:
        parent[op] = parent[parent[op]]
        op = parent[op]
    return op


@kernel
def join_ties(
    units: UnitForest, first: LongArray, second: LongArray, max_s: float, max_bytes: int
) -> int:
    """Join the units of each pair while the result stays within both caps; how many were joined."""
    num_joined = 0
    for index in range(len(first)):
        one, other = _root(units.parent, first[index]), _root(units.parent, second[index])
        if one == other:
            continue
        seconds = units.seconds[one] + units.seconds[other]
        num_bytes = units.num_bytes[one] + units.num_bytes[other]
        if seconds > max_s or num_bytes > max_bytes:
            continue
        root = min(one, other)
        units.parent[max(one, other)] = root
        units.seconds[root] = seconds
        units.num_bytes[root] = num_bytes
        num_joined += 1
    return num_joined


@kernel
def find_sole_readers(units: UnitForest, readers: Readers, found: LongArray) -> None:
    """``found[op]``: root of the one other unit that reads what the op makes; -1 for none."""
    for op in range(len(found)):
        own, sole, num_units = _root(units.parent, op), -1, 0
        start = readers.user_ptr[readers.made_ptr[op]]
        stop = readers.user_ptr[readers.made_ptr[op + 1]]
        for index in range(start, stop):
            unit = _root(units.parent, readers.users[index])
            if unit != own and unit != sole:
                num_units += 1
                sole = unit
        found[op] = sole if num_units == 1 else -1
