"""Regression and trees."""

# ruff: noqa: N803  (names and loops as people write them)
from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import IDX, PTR, K, M, N, column, floats, loop, whole


@loop("serial", PTR, IDX, whole(12), whole(5), whole(6), 1)
def sparse_regression(indptr, indices, x, y, w, lr):
    for r in range(len(y)):
        s = 0
        for p in range(indptr[r], indptr[r + 1]):
            s += x[p] * w[indices[p]]
        g = y[r] - s
        for p in range(indptr[r], indptr[r + 1]):
            w[indices[p]] += lr * g * x[p]


@loop("independent", PTR, IDX, whole(12), whole(5), whole(6), 1, permit={"w": "buffer"})
def sparse_regression_buffered(indptr, indices, x, y, w, lr):
    for r in range(len(y)):
        s = 0
        for p in range(indptr[r], indptr[r + 1]):
            s += x[p] * w[indices[p]]
        g = y[r] - s
        for p in range(indptr[r], indptr[r + 1]):
            w[indices[p]] += lr * g * x[p]


@loop("independent", whole(N, K), whole(N), whole(K))
def loss(X, y, w):
    total = 0
    for n in range(len(y)):
        e = y[n] - X[n] @ w
        total += e * e
    return total


@loop("independent", whole(N, K), whole(N), whole(K), np.zeros(K, np.int64))
def gradient(X, y, w, g):
    for n in range(len(y)):
        g += (y[n] - X[n] @ w) * X[n]


@loop("independent", column(N, 6), whole(N), np.zeros(6, np.int64))
def histogram(bins, weight, h):
    for n in range(len(bins)):
        h[bins[n]] += weight[n]


@loop("independent", floats(N), np.zeros(8), np.zeros(8, np.int64), ordered="serial")
def histogram_of_floats(x, sums, counts):
    for n in range(len(x)):
        b = int(x[n]) % 8
        sums[b] += x[n]
        counts[b] += 1


@loop("1d", whole(N, M, low=0, high=4), whole(N), np.zeros((M, 4), np.int64))
def tree_histogram(bins, g, h):
    for n in range(bins.shape[0]):
        for f in range(bins.shape[1]):
            h[f, bins[n, f]] += g[n]


@loop("independent", whole(N), np.zeros(8, np.int64), ordered="independent")
def integer_histogram_by_value(x, h):
    for v in x:
        h[v % 8] += 1


@loop("serial", floats(N), np.zeros(8, np.int64))
def truncating_histogram(x, h):
    for v in x:
        h[int(v) % 8] += v * 0.5
