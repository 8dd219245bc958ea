"""The arrays of heaps, sets of marks and tables, made in numpy for compiled code."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.base.arrays import BoolArray, FloatArray, LongArray

_T = TypeVar("_T", bound=np.generic)
ZERO = cast(int, np.int64(0))
"""For a plain 0 as argument the compiler would make a further version of a function."""


class Heaps(NamedTuple):
    """Heaps of (key, item), each with its own part of the arrays."""

    key: FloatArray
    item: LongArray
    ptr: LongArray
    """Where the part of each heap begins."""
    size: LongArray


class Marks(NamedTuple):
    """A set of small numbers that remembers in which order they came."""

    has: BoolArray
    item: LongArray
    size: LongArray


def new_heaps(ptr: LongArray) -> Heaps:
    """Empty heaps; heap i holds up to ``ptr[i + 1] - ptr[i]`` entries."""
    total = int(ptr[-1]) + 1
    return Heaps(key=np.zeros(total), item=zeros(total), ptr=ptr, size=zeros(len(ptr) - 1))


def new_marks(count: int) -> Marks:
    """An empty set of numbers below ``count``."""
    return Marks(has=np.zeros(count, dtype=np.bool_), item=zeros(count), size=zeros(1))


def zeros(count: int) -> LongArray:
    """Whole numbers, all 0."""
    return np.zeros(count, dtype=np.int64)


def table(values: ArrayLike, dtype: type[_T]) -> NDArray[_T]:
    """A read-only view: writable arrays are another type to Numba, which would compile twice."""
    array = np.ascontiguousarray(values, dtype=dtype).view()
    array.setflags(write=False)
    return array
