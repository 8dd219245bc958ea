"""Sparse rows."""

from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import IDX, PTR, loop, whole


@loop("independent", PTR, IDX, whole(12), whole(6), np.zeros(5, np.int64))
def csr_times_vector(indptr, indices, data, x, y):
    for r in range(len(y)):
        s = 0
        for p in range(indptr[r], indptr[r + 1]):
            s += data[p] * x[indices[p]]
        y[r] = s


@loop("1d", PTR, IDX, whole(12), whole(5), np.zeros(6, np.int64))
def csr_transposed(indptr, indices, data, x, y):
    for r in range(len(x)):
        xr = x[r]
        for p in range(indptr[r], indptr[r + 1]):
            y[indices[p]] = y[indices[p]] * 2 + data[p] * xr


@loop("independent", PTR, whole(12))
def csr_normalise_rows(indptr, data):
    for r in range(len(indptr) - 1):
        s = 1
        for p in range(indptr[r], indptr[r + 1]):
            s += abs(data[p])
        for p in range(indptr[r], indptr[r + 1]):
            data[p] = data[p] * 100 // s


@loop("serial", np.array([0, 4, 3, 8]), whole(12))
def csr_overlapping_rows(indptr, data):
    for r in range(len(indptr) - 1):
        s = 1
        for p in range(indptr[r], indptr[r + 1] + 1):
            s += data[p]
        for p in range(indptr[r], indptr[r + 1] + 1):
            data[p] = data[p] + s


@loop("independent", whole(12))
def blocks_of_four(x):
    for b in range(3):
        x[4 * b : 4 * b + 4] = x[4 * b : 4 * b + 4] * 2 + b


@loop("serial", whole(12))
def overlapping_blocks(x):
    for b in range(3):
        x[3 * b : 3 * b + 4] = x[3 * b : 3 * b + 4] * 2 + b
