"""Find aliasing between arrays of a call: shared memory, overlaps, and overlapping strides."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from hocket.loops.form import Refusal


def owners(values: Mapping[str, Any]) -> dict[str, str]:
    """Owner of every array: the first name of the same array (same cells, same shape)."""
    found: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name in sorted(values):
        value = values[name]
        if isinstance(value, np.ndarray):
            place = value.__array_interface__["data"][0]
            key = (place, value.shape, value.strides, value.dtype.str)
            found[name] = seen.setdefault(key, name)
    return found


def shared_pairs(values: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Pairs of different arrays that have cells in common."""
    arrays = sorted(set(owners(values).values()))
    return frozenset(
        pair for pair in combinations(arrays, 2) if _share(values[pair[0]], values[pair[1]])
    )


def layout(values: Mapping[str, Any]) -> Any:
    """Shapes and strides of all arrays, which names are one array, and which arrays overlap."""
    found = [
        (name, owner, values[name].shape, values[name].strides)
        for name, owner in owners(values).items()
    ]
    return found, shared_pairs(values)


def check_overlaps(values: Mapping[str, Any], written: frozenset[str], line: int) -> None:
    """Raise `Refusal` if a written array shares cells with another array, or with itself."""
    known = sorted(set(owners(values).values()))
    for name in sorted(written & set(known)):
        if _sees_cells_twice(values[name]):
            raise Refusal(f"{name} is written but shows some of its cells more than once", line)
        for other in known:
            if other != name and _share(values[name], values[other]):
                raise Refusal(
                    f"{name} is written and shares memory with {other}; give the loop a copy of "
                    "one of them",
                    line,
                )


def _share(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if not np.may_share_memory(one, other):
        return False
    try:
        # The exact answer may take exponential time; beyond this effort, sharing is assumed.
        return bool(np.shares_memory(one, other, max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _sees_cells_twice(array: np.ndarray[Any, Any]) -> bool:
    """True if two indices may refer to one cell (broadcast or overlapping windows)."""
    axes = sorted(
        (abs(stride), length)
        for stride, length in zip(array.strides, array.shape, strict=True)
        if length > 1
    )
    reach = array.itemsize
    for stride, length in axes:
        # Axes are sorted by stride: a step smaller than the extent of the smaller axes would
        # revisit their cells.
        if stride < reach:
            return True
        reach = stride * (length - 1) + reach
    return False
