"""Names of the array types used throughout hocket, and small index functions on arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int32]
"""Indices and small counts."""
LongArray = NDArray[np.int64]
"""Bytes, large counts and pointers into other arrays."""
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
"""Masks and flags."""


def pointers(sizes: ArrayLike) -> LongArray:
    """Start offset of each of several consecutive parts, followed by the total (CSR pointers)."""
    ptr = np.zeros(np.size(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ptr[1:])
    return ptr


def positions(order: NDArray[np.integer]) -> LongArray:
    """Inverse permutation: the position of each number in ``order``."""
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.arange(len(order))
    return found


def spans(ptr: LongArray, parts: NDArray[np.integer]) -> tuple[LongArray, LongArray]:
    """Indices of several parts of an array in CSR layout, concatenated.

    Returns the indices, and for each index the position of its part in ``parts``.
    """
    sizes = ptr[parts + 1] - ptr[parts]
    of = np.repeat(np.arange(len(parts)), sizes)
    return np.arange(len(of)) + np.repeat(ptr[parts] - pointers(sizes)[:-1], sizes), of
