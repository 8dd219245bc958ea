"""Lattices of ideals: the sets of pieces that the first stages of a contiguous split can hold.

An ideal is a set of pieces that contains, with each piece, all that precede it. A split into
contiguous stages is a chain of ideals, each stage the difference of two. A lattice has its ideals
numbered so that smaller sets come first, and the steps that add one piece. The chain of a
topological order is the lattice with the order's prefixes alone.
O(ideals · pieces · words of 64 pieces).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.planners.max_load.pieces import Pieces

# All ideals of a precedence, breadth first, in compiled code.

_ONE = np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@kernel
def _slot_of(ideal: NDArray[np.uint64], row: int, slots: LongArray) -> int:
    """Hash-table slot of the set in ``row``, or the free slot where it belongs."""
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
    capacity, num_ideals, num_steps, at = len(ideal) - 1, 1, 0, 0
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
            if num_steps == steps.shape[1] or (is_new and num_ideals == capacity):
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


_WORD = 64
_STEPS_PER_IDEAL = 16
"""Allocated steps; graphs that need more on average have more ideals than can be walked."""


class Lattice(NamedTuple):
    """Ideals by number: 0 is empty, the last one holds all pieces."""

    step_ptr: LongArray
    """From ideal i lead steps ``step_ptr[i]`` up to ``step_ptr[i + 1]``."""
    step_piece: LongArray
    """The piece that each step adds."""
    step_ideal: LongArray
    """The ideal that each step leads to."""
    from_ideal: LongArray
    """A smaller ideal by one piece; -1 for the empty one."""
    from_piece: LongArray
    """The piece by which they differ."""

    @property
    def num_ideals(self) -> int:
        """Number of ideals."""
        return len(self.step_ptr) - 1


def chain_lattice(order: IntArray) -> Lattice:
    """The prefixes of an order."""
    count = len(order)
    numbers = np.arange(count + 1)
    return Lattice(
        step_ptr=table(np.minimum(np.arange(count + 2), count), np.int64),
        step_piece=table(order, np.int64),
        step_ideal=table(numbers[1:], np.int64),
        from_ideal=table(numbers - 1, np.int64),
        from_piece=table(np.concatenate(([-1], order)), np.int64),
    )


def ideal_lattice(pieces: Pieces, max_ideals: int) -> Lattice | None:
    """All ideals of the pieces' precedence; None where there are more than ``max_ideals``."""
    count = pieces.num_pieces
    needs = np.zeros((count, max(1, -(-count // _WORD))), dtype=np.uint64)
    bit = np.left_shift(np.uint64(1), (pieces.before % _WORD).astype(np.uint64))
    np.bitwise_or.at(needs, (pieces.after, pieces.before // _WORD), bit)
    # Most lattices are small, and arrays for the largest would be made for nothing.
    capacity = min(1024, max_ideals)
    while True:
        found = _grown(needs, capacity)
        if found is not None or capacity == max_ideals:
            return found
        capacity = min(capacity * 8, max_ideals)


def _grown(needs: NDArray[np.uint64], capacity: int) -> Lattice | None:
    """The lattice, if it has at most ``capacity`` ideals and not many more steps."""

    count, num_words = needs.shape
    ideal = np.zeros((capacity + 1, num_words), dtype=np.uint64)
    from_ideal, from_piece = np.full(capacity + 1, -1), np.full(capacity + 1, -1)
    step_ptr = np.zeros(capacity + 2, dtype=np.int64)
    steps = np.zeros((2, capacity * _STEPS_PER_IDEAL + count), dtype=np.int64)
    slots = np.full(1 << (2 * capacity).bit_length(), -1, dtype=np.int64)
    num_ideals = grow(
        table(needs, np.uint64), ideal, slots, step_ptr, steps, from_ideal, from_piece
    )
    if num_ideals < 0:
        return None
    num_steps = step_ptr[num_ideals]
    return Lattice(
        step_ptr=table(step_ptr[: num_ideals + 1], np.int64),
        step_piece=table(steps[0, :num_steps], np.int64),
        step_ideal=table(steps[1, :num_steps], np.int64),
        from_ideal=table(from_ideal[:num_ideals], np.int64),
        from_piece=table(from_piece[:num_ideals], np.int64),
    )
