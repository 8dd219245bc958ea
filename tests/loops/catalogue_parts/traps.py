"""Traps: loops that look parallel and are not, and the other way round."""

# ruff: noqa: N803  (names and loops as people write them)
from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import K, M, N, column, loop, whole


@loop("serial", whole(N), N - 1)
def minus_the_index(x, c):
    for n in range(len(x)):
        x[c - n] = x[n] * 2


@loop("skewed", whole(N))
def every_second_from_where_the_outer_is(x):
    for i in range(3):
        for j in range(i, len(x) - 1, 2):
            x[j] = x[j + 1] + 1


@loop("independent", whole(N), N - 1)
def minus_the_index_both(x, c):
    for n in range(len(x)):
        x[c - n] = x[c - n] * 2


@loop("serial", whole(N))
def reads_the_last_that_it_writes(x):
    for n in range(len(x)):
        x[n] = x[n] + x[len(x) - 1]


@loop("independent", whole(N))
def reads_one_behind_the_last(x):
    for n in range(len(x) - 1):
        x[n] = x[n] + x[len(x) - 1]


@loop("serial", np.zeros((2, 6), np.int64), column(N, 6), column(N, 6, seed=5))
def two_cells_each(A, u, i):
    for n in range(len(u)):
        A[0, u[n]] = n
        A[0, i[n]] = n


@loop("serial", column(N, 5), whole(N), whole(5))
def writes_its_index(u, x, out):
    for n in range(len(x) - 1):
        out[u[n]] = out[u[n]] * 2 + x[n]
        u[n + 1] = (u[n + 1] + 1) % 5


@loop("serial", whole(5, K), column(N, 5), column(N, 5, seed=7))
def swaps_views(W, u, i):
    for n in range(len(u)):
        a = W[u[n]]
        b = W[i[n]]
        for k in range(3):
            a, b = b, a
            a[k] = b[k] + 1


@loop("serial", whole(N))
def stops_early(x):
    for n in range(len(x)):
        if x[n] == 4:
            break
        x[n] += 1


@loop("independent", whole(N), np.zeros(N, np.int64))
def skips_some(x, out):
    for n in range(len(x)):
        if x[n] < 0:
            continue
        out[n] = x[n]


@loop("serial", whole(M, K), np.zeros(M, np.int64))
def inner_break(A, out):
    for r in range(len(A)):
        for c in range(A.shape[1]):
            if A[r, c] > 0:
                break
        out[r] = c


@loop("independent", whole(M, K), np.zeros(K, np.int64), np.zeros(M, np.int64))
def scratch(A, tmp, out):
    for r in range(len(A)):
        for k in range(len(tmp)):
            tmp[k] = A[r, k] * 2
        s = 0
        for k in range(len(tmp)):
            s += tmp[k]
        out[r] = s


@loop("independent", whole(M, K), np.zeros((K, K), np.int64), np.zeros(M, np.int64))
def scratch_of_two_dimensions(A, tmp, out):
    for r in range(len(A)):
        for k in range(len(tmp)):
            for m in range(len(tmp)):
                tmp[k, m] = A[r, k] * A[r, m]
        s = 0
        for k in range(len(tmp)):
            s += tmp[k, 0] - tmp[0, k] + tmp[k, k]
        out[r] = s


@loop("independent", whole(M, K), np.zeros((K, K), np.int64), np.zeros(M, np.int64))
def scratch_of_two_dimensions_zeroed(A, tmp, out):
    for r in range(len(A)):
        tmp[:, :] = 0
        for k in range(A.shape[1]):
            tmp[k, 0] += A[r, k]
        out[r] = tmp[1, 0] + tmp[2, 1]


@loop("serial", whole(M, K), np.zeros((K, K), np.int64), np.zeros(M, np.int64))
def scratch_filled_in_a_triangle(A, tmp, out):
    for r in range(len(A)):
        for k in range(len(tmp)):
            for m in range(k):
                tmp[k, m] = A[r, k] * A[r, m]
        tmp[0, 0] += 1
        out[r] = tmp[0, 0] + tmp[2, 1]


@loop("serial", whole(M, K), np.zeros((K, K), np.int64), np.zeros(M, np.int64))
def scratch_with_a_column_left(A, tmp, out):
    for r in range(len(A)):
        for k in range(len(tmp)):
            for m in range(len(tmp) - 1):
                tmp[k, m] = A[r, k] * A[r, m]
        tmp[1, len(tmp) - 1] += tmp[0, 0]
        out[r] = tmp[1, len(tmp) - 1]


@loop("serial", whole(M, K), np.zeros(K, np.int64), np.zeros(M, np.int64))
def scratch_partly_filled(A, tmp, out):
    for r in range(len(A)):
        for k in range(len(tmp) - 1):
            tmp[k + 1] = A[r, k] + tmp[k]
        out[r] = tmp[2]


@loop("independent", whole(M, K), np.zeros(M, np.int64))
def local_array(A, out):
    for r in range(len(A)):
        t = np.zeros(3)
        for k in range(3):
            t[k] = A[r, k]
        out[r] = t.sum()
