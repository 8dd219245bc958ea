"""A placement that fits, whatever its loads: where no contiguous split does, a search starts here.

Largest pieces first, each on the device with most free bytes that can run it. O(pieces · devices).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.planners.max_load.pieces import Pieces


def packed(pieces: Pieces, limit_bytes: LongArray) -> IntArray | None:
    """A device for each piece; None where a piece finds no room."""
    free = limit_bytes.astype(np.float64)
    device_of = np.zeros(pieces.num_pieces, dtype=np.int32)
    for piece in np.argsort(-pieces.memory_bytes, kind="stable"):
        can_run = np.isfinite(pieces.seconds[:, piece])
        device = int(np.argmax(np.where(can_run, free, -np.inf)))
        free[device] -= pieces.memory_bytes[piece]
        if free[device] < 0 or not can_run[device]:
            return None
        device_of[piece] = device
    return device_of
