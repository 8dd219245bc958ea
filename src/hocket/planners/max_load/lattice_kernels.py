"""All ideals of a precedence, breadth first, in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import LongArray
from hocket.kernels import kernel

_ONE = np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@kernel
def _slot_of(ideal: NDArray[np.uint64], row: int, slots: LongArray) -> int:
    """Where the set in ``row`` stands in the table of known ones, or the slot where it belongs."""
    mixed = np.uint64(0)
    for index in range(ideal.shape[1]):
        mixed = (mixed ^ ideal[row, index]) * _MIX
        mixed ^= mixed >> _SHIFT
    mask = len(slots) - 1
    slot = np.int64(mixed & np.uint64(mask))
    while slots[slot] >= 0 and not _are_same(ideal, row, slots[slot]):
        slot = (slot + 1) & mask
    return int(slot)


@kernel
def _are_same(ideal: NDArray[np.uint64], row: int, other: int) -> bool:
    same = True
    for index in range(ideal.shape[1]):
        same = same and ideal[row, index] == ideal[other, index]
    return same


@kernel
def _can_follow(needs: NDArray[np.uint64], ideal: NDArray[np.uint64], row: int, piece: int) -> bool:
    if (ideal[row, piece >> 6] >> np.uint64(piece & 63)) & _ONE:
        return False
    missing = np.uint64(0)
    for index in range(ideal.shape[1]):
        missing |= needs[piece, index] & ~ideal[row, index]
    return bool(missing == np.uint64(0))


@kernel
def grow(
    needs: NDArray[np.uint64],
    ideal: NDArray[np.uint64],
    slots: LongArray,
    step_ptr: LongArray,
    steps: LongArray,
    from_ideal: LongArray,
    from_piece: LongArray,
) -> int:
    """Fill the arrays of a lattice; the number of ideals, or -1 where the arrays are too small.

    The next set is made in the row after the last known one and stays there if it is new.
    """
    room, num_ideals, num_steps, at = len(ideal) - 1, 1, 0, 0
    slots[_slot_of(ideal, 0, slots)] = 0
    while at < num_ideals:
        step_ptr[at] = num_steps
        for piece in range(len(needs)):
            if not _can_follow(needs, ideal, at, piece):
                continue
            for index in range(ideal.shape[1]):
                ideal[num_ideals, index] = ideal[at, index]
            ideal[num_ideals, piece >> 6] |= _ONE << np.uint64(piece & 63)
            slot = _slot_of(ideal, num_ideals, slots)
            is_new = slots[slot] < 0
            if num_steps == steps.shape[1] or (is_new and num_ideals == room):
                return -1
            if is_new:
                slots[slot] = num_ideals
                from_ideal[num_ideals], from_piece[num_ideals] = at, piece
                num_ideals += 1
            steps[0, num_steps], steps[1, num_steps] = piece, slots[slot]
            num_steps += 1
        at += 1
    step_ptr[num_ideals] = num_steps
    return num_ideals
