"""Lattices of ideals: the sets of pieces that the first stages of a contiguous split can hold.

An ideal is a set of pieces that contains all predecessors of its pieces. A split into contiguous
stages is a chain of ideals; each stage is the difference of two successive ideals. A lattice
numbers its ideals so that smaller sets come first, and lists the steps that add one piece. For a
single topological order the lattice is a chain: the order's prefixes. O(ideals · pieces · 64-bit
words per set of pieces).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.kernels.containers import table
from hocket.planners.max_load.load_pieces import Pieces


class Lattice(NamedTuple):
    """Ideals by number: 0 is empty, the last one contains all pieces."""

    step_ptr: LongArray
    """Steps from ideal i: ``step_ptr[i]`` up to ``step_ptr[i + 1]``."""
    step_piece: LongArray
    """Per step: the piece that it adds."""
    step_ideal: LongArray
    """Per step: the ideal that it leads to."""
    from_ideal: LongArray
    """Per ideal: an ideal with one piece less; -1 for the empty one."""
    from_piece: LongArray
    """Per ideal: the piece that ``from_ideal`` lacks."""

    @property
    def num_ideals(self) -> int:
        """Number of ideals."""
        return len(self.step_ptr) - 1


def chain_lattice(order: IntArray) -> Lattice:
    """Return the lattice of the prefixes of an order."""
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
    """Return all ideals of the pieces' precedence; None if there are more than ``max_ideals``.

    Breadth-first search; each ideal is an integer whose bits are its pieces.
    """
    needs = [0] * pieces.num_pieces
    followers: list[list[int]] = [[] for _ in needs]
    for before, after in zip(pieces.before.tolist(), pieces.after.tolist(), strict=True):
        needs[after] |= 1 << before
        followers[before].append(after)
    ideals, number = [0], {0: 0}
    can_follow = [[piece for piece, need in enumerate(needs) if not need]]
    step_ptr, step_piece, step_ideal, from_ideal, from_piece = [0], [], [], [-1], [-1]
    for at, ideal in enumerate(ideals):
        for piece in can_follow[at]:
            larger = ideal | 1 << piece
            if larger not in number:
                if len(ideals) == max_ideals:
                    return None
                number[larger] = len(ideals)
                ideals.append(larger)
                from_ideal.append(at)
                from_piece.append(piece)
                freed = [other for other in followers[piece] if not needs[other] & ~larger]
                can_follow.append([other for other in can_follow[at] if other != piece] + freed)
            step_piece.append(piece)
            step_ideal.append(number[larger])
        step_ptr.append(len(step_piece))
    columns = (step_ptr, step_piece, step_ideal, from_ideal, from_piece)
    return Lattice(*(table(column, np.int64) for column in columns))
