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

from hocket.arrays import FloatArray

Counts = NDArray[np.int64]

EQUAL = 1e-8
"""Relative difference below which two throughputs count as the same."""
_GRID_BITS = 30


@dataclass(frozen=True, eq=False, kw_only=True)
class Classes:
    """Which jobs are alike, and the rows that stand for them."""

    of: Counts
    """The class of each job."""
    num_jobs: Counts
    first: Counts
    """One job of each class."""
    rows: FloatArray
    """``[class, column]``: the values of the class, snapped where they were nearly equal."""


def find_classes(values: FloatArray, exact: FloatArray) -> Classes:
    """Classes of jobs with nearly equal rows of ``values`` and equal rows of ``exact``."""
    first, of = _distinct(np.hstack([values, exact]))
    rows, marks = snap(values[first]), exact[first]
    again, merged = _distinct(np.hstack([rows, marks]))
    order = _similar_together(rows[again])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    of = rank[merged[of]]
    return Classes(
        of=of,
        num_jobs=np.bincount(of, minlength=len(again)),
        first=first[again][order],
        rows=np.ascontiguousarray(rows[again][order]),
    )


def _similar_together(rows: FloatArray) -> Counts:
    """An order in which neighbours favour the same columns: compiled code guesses right then."""
    if not rows.size:
        return np.arange(len(rows))
    favour = rows / np.maximum(rows.mean(axis=0), 1e-300)
    ranked = np.argsort(favour, axis=1, kind="stable")
    return np.lexsort(ranked.T[-2:] if rows.shape[1] > 1 else ranked.T)


def snap(values: FloatArray) -> FloatArray:
    """Every column with its nearly equal values made equal."""
    snapped = np.empty_like(values)
    for column in range(values.shape[1]):
        snapped[:, column] = _snap_column(values[:, column])
    return snapped


def _snap_column(values: FloatArray) -> FloatArray:
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    is_new = np.ones(len(values), dtype=bool)
    is_new[1:] = np.diff(ascending) > EQUAL * ascending[1:]
    starts = ascending[is_new]
    # A shorter mantissa, so that the same class gets the same number whoever is in it.
    fraction, exponent = np.frexp(starts)
    starts = np.ldexp(np.round(np.ldexp(fraction, _GRID_BITS)), exponent - _GRID_BITS)
    snapped = np.empty_like(values)
    snapped[order] = starts[np.cumsum(is_new) - 1]
    return snapped


def _distinct(rows: FloatArray) -> tuple[Counts, Counts]:
    """The first of all equal rows, in order of appearance, and which of them each row equals."""
    digest = _digest(rows)
    _, first, of = np.unique(digest, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    first, of = np.sort(first), rank[of]
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
