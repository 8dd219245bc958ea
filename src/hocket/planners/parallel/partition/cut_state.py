"""The arrays in which the programme over stages and layers keeps what it found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray


class CutState(NamedTuple):
    """The best way to fill some stages with the first layers."""

    sum_s: FloatArray
    """[way, layers]."""
    came_from: LongArray
    """[way, layers]: where the last stage starts."""
    came_step: LongArray
    """[way, layers]: the step that added it."""


def new_cuts(num_ways: int, num_layers: int) -> CutState:
    """Arrays for one order and model."""
    shape = (num_ways, num_layers + 1)
    return CutState(
        sum_s=np.zeros(shape),
        came_from=np.zeros(shape, dtype=np.int64),
        came_step=np.zeros(shape, dtype=np.int64),
    )
