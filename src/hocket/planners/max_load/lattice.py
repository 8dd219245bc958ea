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
from hocket.kernels.containers import table
from hocket.planners.max_load.pieces import Pieces

_WORD = 64
_STEPS_PER_IDEAL = 16
"""Room for steps; graphs that need more on average have more ideals than can be walked."""


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
    room = min(1024, max_ideals)
    while True:
        found = _grown(needs, room)
        if found is not None or room == max_ideals:
            return found
        room = min(room * 8, max_ideals)


def _grown(needs: NDArray[np.uint64], room: int) -> Lattice | None:
    """The lattice, if it has at most ``room`` ideals and not many more steps."""
    from hocket.planners.max_load.lattice_kernels import grow

    count, num_words = needs.shape
    ideal = np.zeros((room + 1, num_words), dtype=np.uint64)
    from_ideal, from_piece = np.full(room + 1, -1), np.full(room + 1, -1)
    step_ptr = np.zeros(room + 2, dtype=np.int64)
    steps = np.zeros((2, room * _STEPS_PER_IDEAL + count), dtype=np.int64)
    slots = np.full(1 << (2 * room).bit_length(), -1, dtype=np.int64)
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
