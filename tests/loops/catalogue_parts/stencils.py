"""Stencils and wavefronts."""

# ruff: noqa: N803  (names and loops as people write them)
from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import M, N, floats, loop, whole


@loop("wavefront", floats(M, N))
def gauss_seidel(A):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1, m - 1):
            A[i, j] = A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1]


@loop("skewed", whole(M, N))
def gauss_seidel_nine(A):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1, m - 1):
            A[i, j] = (A[i - 1, j - 1] + A[i - 1, j + 1] + A[i, j - 1] + A[i + 1, j + 1]) % 17


@loop("skewed", whole(M, N))
def one_minus_one(A):
    n, m = A.shape
    for i in range(1, n):
        for j in range(1, m - 1):
            A[i, j] = (A[i - 1, j + 1] + 2 * A[i, j - 1]) % 31


@loop("skewed", whole(M, N))
def one_minus_two(A):
    n, m = A.shape
    for i in range(1, n):
        for j in range(1, m - 2):
            A[i, j] = (A[i - 1, j + 2] + 2 * A[i, j - 1]) % 31


@loop("wavefront", whole(M, N))
def backward_sweep(A):
    n, m = A.shape
    for i in range(n - 2, -1, -1):
        for j in range(m - 2, -1, -1):
            A[i, j] = (A[i + 1, j] + 2 * A[i, j + 1]) % 31


@loop("wavefront", whole(M, N))
def mixed_directions(A):
    n, m = A.shape
    for i in range(1, n):
        for j in reversed(range(m - 1)):
            A[i, j] = (A[i - 1, j] + A[i, j + 1]) % 31


@loop("skewed", whole(M, N))
def against_the_inner_direction(A):
    n, m = A.shape
    for i in range(1, n):
        for j in range(m - 2, 0, -1):
            A[i, j] = (A[i - 1, j - 1] + A[i, j + 1]) % 31


@loop("independent", whole(M, N), np.zeros((M, N), np.int64))
def jacobi(A, B):
    for i in range(1, A.shape[0] - 1):
        for j in range(1, A.shape[1] - 1):
            B[i, j] = A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1]


@loop("1d", whole(M, N))
def along_rows(A):
    for i in range(A.shape[0]):
        for j in range(1, A.shape[1]):
            A[i, j] += A[i, j - 1]


@loop("1d", whole(M, N))
def along_columns(A):
    for i in range(1, A.shape[0]):
        for j in range(A.shape[1]):
            A[i, j] += A[i - 1, j]


@loop("skewed", whole(4), whole(N))
def time_steps_in_place(steps, x):
    for t in range(len(steps)):
        for i in range(1, len(x) - 1):
            x[i] = (x[i - 1] + x[i + 1] + t) % 13


@loop("rotation", whole(M, N), whole(M), whole(N), ordered="wavefront")
def rows_and_columns(A, r, c):
    for i in range(A.shape[0]):
        for j in range(A.shape[1]):
            r[i] = (r[i] * 2 + A[i, j]) % 13
            c[j] = (c[j] * 3 + A[i, j] + r[i]) % 11


@loop("wavefront", whole(M + 1, M + 1))
def triangle(A):
    for i in range(1, len(A)):
        for j in range(1, i):
            A[i, j] = (A[i - 1, j] + A[i, j - 1]) % 17


@loop("wavefront", whole(8, 8))
def edit_distance(D):
    for i in range(1, D.shape[0]):
        for j in range(1, D.shape[1]):
            D[i, j] = min(D[i - 1, j], D[i, j - 1], D[i - 1, j - 1]) + 1


@loop("independent", whole(M, M))
def upper_triangle(A):
    for i in range(len(A)):
        for j in range(i + 1, len(A)):
            A[i, j] = A[i, j] * 2


@loop("independent", whole(M, M))
def transpose_in_place(A):
    for i in range(len(A)):
        for j in range(i):
            A[i, j], A[j, i] = A[j, i], A[i, j]


@loop("independent", whole(N, N), np.zeros((N, N), np.int64))
def symmetric_from_the_diagonal(x, out):
    for i in range(len(x)):
        for j in range(i, len(x)):
            out[i, j] = x[i, j] * x[j, i]
            out[j, i] = out[i, j]


@loop("independent", whole(N, N), np.zeros((N, N), np.int64))
def symmetric_below_the_diagonal(x, out):
    for i in range(len(x)):
        for j in range(i + 1):
            out[i, j] = x[i, j]
            out[j, i] = out[i, j]


@loop("serial", whole(N, N), np.zeros((N, N), np.int64))
def mirrored_from_both_sides(x, out):
    for i in range(len(x)):
        for j in range(len(x)):
            out[i, j] = x[i, j]
            out[j, i] = out[i, j] + 1


@loop("serial", whole(N, N), np.zeros((N, N), np.int64))
def mirrored_across_the_diagonal(x, out):
    for i in range(1, len(x)):
        for j in range(i - 1, len(x)):
            out[i, j] = x[i, j]
            out[j, i] = out[i, j] + i


@loop("independent", floats(M, N))
def red_sweep(A):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1 + i % 2, m - 1, 2):
            A[i, j] = A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1]


@loop("independent", floats(M, N), 1)
def sweep_of_a_colour(A, colour):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(2 - ((i + colour) & 1), m - 1, 2):
            A[i, j] = A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1]


@loop("skewed", whole(M, N))
def red_sweep_with_diagonals(A):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1 + i % 2, m - 1, 2):
            A[i, j] = (A[i - 1, j - 1] + A[i + 1, j - 1] + A[i, j - 1]) % 31


@loop("independent", floats(M, N))
def every_third_along_a_diagonal(A):
    n, m = A.shape
    for i in range(1, n):
        for j in range(i, m - 1, 3):
            A[i, j] = A[i - 1, j] + A[i, j + 1]
