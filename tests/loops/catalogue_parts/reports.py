"""Loops of public reports on parallel loops that went wrong."""

# ruff: noqa: N803  (names and loops as people write them)
from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import K, M, N, loop, whole


@loop("independent", whole(M, K), np.zeros(K, np.int64))
def sum_of_rows(A, out):  # an array that all iterations add to
    for i in range(A.shape[0]):
        out += A[i]


@loop("independent", whole(N, 2), np.zeros(2, np.int64))
def sum_into_one_cell(A, out):
    for i in range(A.shape[0]):
        out[0] += A[i, 0]
        out[1] += A[i, 1]


@loop("serial", whole(N), np.zeros(N, np.int64))
def carried_counter(x, out):  # a position that moves on only sometimes
    k = 0
    for i in range(len(x)):
        if x[i] > 0:
            out[k] = x[i]
            k += 1
    return k


@loop("serial", whole(N))
def carried_pair(x):
    a, b = 0, 1
    for i in range(len(x)):
        a, b = b, (a + b + x[i]) % 101
    return a


@loop("wavefront", whole(7), whole(8), np.zeros((8, 9), np.int64))
def time_warping(a, b, D):  # accumulated costs of two series
    for i in range(len(a)):
        for j in range(len(b)):
            c = abs(a[i] - b[j])
            D[i + 1, j + 1] = c + min(D[i, j + 1], D[i + 1, j], D[i, j])


@loop("independent", whole(M, K), np.zeros((M, K), np.int64))
def no_race_after_all(A, B):
    for i in range(A.shape[0]):
        row = B[i]
        for j in range(A.shape[1]):
            row[j] += A[i, j]
