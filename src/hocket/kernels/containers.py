"""Containers for compiled code, allocated with numpy: heaps, sets of small numbers, constant
tables.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.base.arrays import BoolArray, FloatArray, LongArray

_T = TypeVar("_T", bound=np.generic)
ZERO = cast(int, np.int64(0))
"""0 as a 64-bit number; a Python int would make numba compile one more version of each kernel."""


class Heaps(NamedTuple):
    """Binary heaps of (key, item); each heap has its own range of the shared arrays."""

    key: FloatArray
    item: LongArray
    ptr: LongArray
    """Position in ``key`` and ``item`` at which each heap begins."""
    size: LongArray


class Marks(NamedTuple):
    """A set of small integers that also lists them in the order in which they were added."""

    has: BoolArray
    item: LongArray
    size: LongArray


def new_heaps(ptr: LongArray) -> Heaps:
    """Return empty heaps; heap i can hold ``ptr[i + 1] - ptr[i]`` entries."""
    total = int(ptr[-1]) + 1
    return Heaps(key=np.zeros(total), item=zeros(total), ptr=ptr, size=zeros(len(ptr) - 1))


def new_marks(count: int) -> Marks:
    """Return an empty set for numbers below ``count``."""
    return Marks(has=np.zeros(count, dtype=np.bool_), item=zeros(count), size=zeros(1))


def zeros(count: int) -> LongArray:
    """Return an array of ``count`` 64-bit zeros."""
    return np.zeros(count, dtype=np.int64)


def table(values: ArrayLike, dtype: type[_T]) -> NDArray[_T]:
    """Return values as a read-only contiguous array of one dtype.

    Numba gives writable arrays another type and would compile a kernel once more for them.
    """
    array = np.ascontiguousarray(values, dtype=dtype).view()
    array.setflags(write=False)
    return array
