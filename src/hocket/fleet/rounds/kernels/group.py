"""Jobs that are exactly alike, by a hash table with open addressing. O(jobs x kinds)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.compiled.jit import compiled, compiled_entry

Counts = NDArray[np.int64]

_MULTIPLIER = 0x2545F4914F6CDD1D


@compiled_entry()
def group(rows: Counts, slots: Counts, of: Counts, first: Counts, num_alike: Counts) -> int:
    """Number the distinct rows in order of appearance; returns how many there are.

    ``slots`` are all -1, and a power of two that is larger than the number of rows.
    """
    num_groups, mask = 0, slots.shape[0] - 1
    for i in range(rows.shape[0]):
        slot = _hash(rows, i) & mask
        while slots[slot] >= 0 and not _equal(rows, i, first[slots[slot]]):
            slot = (slot + 1) & mask
        if slots[slot] < 0:
            slots[slot] = num_groups
            first[num_groups] = i
            num_alike[num_groups] = 0
            num_groups += 1
        of[i] = slots[slot]
        num_alike[slots[slot]] += 1
    return num_groups


@compiled
def _hash(rows: Counts, i: int) -> int:
    digest = 0
    for column in range(rows.shape[1]):
        digest = (digest ^ rows[i, column]) * _MULTIPLIER
        digest ^= digest >> 29
    return digest


@compiled
def _equal(rows: Counts, i: int, other: int) -> bool:
    column = 0
    while column < rows.shape[1] and rows[i, column] == rows[other, column]:
        column += 1
    return bool(column == rows.shape[1])
