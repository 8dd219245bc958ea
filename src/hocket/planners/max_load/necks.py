"""Necks: the pieces that a model narrows to, where PipeDream may cut it.

PipeDream (Narayanan et al., SOSP 2019) splits a chain of layers. A model with branches becomes a
chain if everything between two pieces that no precedence passes by is one layer. Found in one walk
over a topological order: a piece is a neck if no precedence starts before it and ends after it.
O(pieces + precedence).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import IntArray, positions
from hocket.planners.max_load.contract import depth_first_order
from hocket.planners.max_load.pieces import Pieces


def neck_blocks(pieces: Pieces) -> IntArray:
    """The block of each of the acyclic pieces: a neck with all that follows up to the next.

    Pieces that nothing orders can stand on either side of a neck or make it none; of two
    depth-first orders the one with more necks counts.
    """
    orders = (depth_first_order(pieces, latest_first=latest) for latest in (True, False))
    return max(
        (_blocks(pieces, order) for order in orders), key=lambda block_of: block_of.max(initial=-1)
    )


def _blocks(pieces: Pieces, order: IntArray) -> IntArray:
    position = positions(order)
    passing = np.zeros(pieces.num_pieces + 1, dtype=np.int64)
    np.add.at(passing, position[pieces.before] + 1, 1)
    np.add.at(passing, position[pieces.after], -1)
    is_neck = np.cumsum(passing)[:-1] == 0
    block_of = np.empty(pieces.num_pieces, dtype=np.int32)
    # The first piece of an order is never passed by, so blocks count from 0.
    block_of[order] = np.cumsum(is_neck) - 1
    return block_of
