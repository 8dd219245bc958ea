"""Where the loops of the catalogue are registered, and the small data that they run on.

Whole numbers throughout, so that results are exact whatever the order of a sum.
"""

# ruff: noqa: E741  (names and loops as people write them)
from __future__ import annotations

import numpy as np

LOOPS = {}
N, M, K = 14, 9, 3


def loop(expected, *data, ordered=None, permit=None):
    """Register a loop: the schedule it should get, and the one with ``ordered=True``."""

    def keep(function):
        LOOPS[function.__name__] = (function, data, expected, ordered or expected, permit)
        return function

    return keep


def whole(*shape, low=-4, high=5, dtype=np.int64, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(low, high, shape).astype(dtype)


def floats(*shape, seed=0):
    return whole(*shape, dtype=np.float64, seed=seed)


def column(size, high, seed=1):
    return whole(size, low=0, high=high, seed=seed)


U, I = column(N, 5), column(N, 4, seed=2)
PTR = np.array([0, 3, 3, 7, 8, 12])
IDX = column(12, 6, seed=3)
