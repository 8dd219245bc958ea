"""Jobs that no objective can tell apart are solved as one.

Averaging any answer over equal jobs keeps it feasible and as good, so a class needs one row however
many jobs it has (Narayanan et al., OSDI 2020, write one row per job). Throughputs closer than the
noise of any measurement count as equal: otherwise noise would decide which of two equal jobs runs
where. O(n k) for the digest of rows, O(n log n) to sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, LongArray, positions

EQUAL = 1e-8
"""Relative difference below which two throughputs count as the same."""
_GRID_BITS = 30
_MAX_ORDERED = 180
"""Columns whose pairs 16 bits can number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class JobClasses:
    """Which jobs are alike, and the rows that stand for them."""

    of: LongArray
    """The class of each job."""
    num_jobs: LongArray
    first: LongArray
    """One job of each class."""
    rows: FloatArray
    """``[class, column]``: the values of the class, snapped where they were nearly equal."""


def find_classes(values: FloatArray, exact: FloatArray) -> JobClasses:
    """Classes of jobs with nearly equal rows of ``values`` and equal rows of ``exact``."""
    first, of = _distinct(np.hstack([values, exact]))
    rows, has_merged = snap(values[first])
    if has_merged:
        again, merged = _distinct(np.hstack([rows, exact[first]]))
        first, rows, of = first[again], rows[again], merged[of]
    order = _similar_together(rows)
    of = positions(order)[of]
    return JobClasses(
        of=of,
        num_jobs=np.bincount(of, minlength=len(order)),
        first=first[order],
        rows=np.ascontiguousarray(rows[order]),
    )


def _similar_together(rows: FloatArray) -> LongArray:
    """An order in which neighbours favour the same columns: compiled code guesses right then."""
    num_rows, num_columns = rows.shape
    if not num_rows or not 2 <= num_columns <= _MAX_ORDERED:
        return np.arange(num_rows)
    favour = rows / np.maximum(rows.mean(axis=0), 1e-300)
    best = favour.argmax(axis=1)
    favour[np.arange(num_rows), best] = -1.0
    # Small integers are sorted by counting.
    both = (best * num_columns + favour.argmax(axis=1)).astype(np.int16)
    return np.argsort(both, kind="stable")


def snap(values: FloatArray) -> tuple[FloatArray, bool]:
    """Every column with its nearly equal values made equal, and whether there were any."""
    columns = np.ascontiguousarray(values.T)
    snapped, has_merged = _shortened(columns), False
    for column, ascending in enumerate(np.sort(columns)):
        gap = np.diff(ascending)
        is_near = gap <= EQUAL * ascending[1:]
        if np.any(is_near & (gap > 0.0)):
            _merge(columns[column], ascending, is_near, snapped[column])
            has_merged = True
    return snapped.T, has_merged


def _merge(
    values: FloatArray, ascending: FloatArray, is_near: BoolArray, snapped: FloatArray
) -> None:
    """Give values that follow each other closely that of the lowest of them."""
    place = np.arange(1, len(ascending))
    start = np.maximum.accumulate(np.where(is_near, 0, place))
    moved = ascending[1:][is_near]
    at = np.minimum(np.searchsorted(moved, values), len(moved) - 1)
    is_moved = moved[at] == values
    snapped[is_moved] = _shortened(ascending[start[is_near]])[at[is_moved]]


def _shortened(values: FloatArray) -> FloatArray:
    """A shorter mantissa, so that the same class gets the same number whoever is in it."""
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(np.ldexp(fraction, _GRID_BITS)), exponent - _GRID_BITS))


def _distinct(rows: FloatArray) -> tuple[LongArray, LongArray]:
    """The first of all equal rows, in order of appearance, and which of them each row equals."""
    digest = _digest(rows)
    if np.all(np.diff(np.sort(digest))):
        return np.arange(len(rows)), np.arange(len(rows))
    _, first, of = np.unique(digest, return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, of = first[order], positions(order)[of]
    if not np.array_equal(rows, rows[first][of]):
        _, first, of = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, of.reshape(-1)


def _digest(rows: FloatArray) -> NDArray[np.uint64]:
    # Adding 0.0 makes one number of the two zeros.
    bits = np.ascontiguousarray(rows + 0.0).view(np.uint64)
    digest = np.zeros(len(rows), dtype=np.uint64)
    for column in range(bits.shape[1]):
        digest = (digest ^ bits[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    return digest
