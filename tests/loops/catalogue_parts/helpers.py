"""Loops that call helpers."""

# ruff: noqa: N803  (names and loops as people write them)
from __future__ import annotations

import math

import numpy as np
from loops.catalogue_parts.register import K, N, column, floats, loop, whole


def axpy(x, y, a):
    for k in range(len(x)):
        y[k] += a * x[k]


def inner_product(x, y):
    total = 0
    for k in range(len(x)):
        total += x[k] * y[k]
    return total


SCALE = 3


def scaled(x):
    return SCALE * x


@loop("independent", whole(N), np.zeros(N, np.int64))
def pure_helper(x, out):
    for n in range(len(x)):
        out[n] = scaled(x[n]) + inner_product(x, x)


@loop("1d", column(N, 5), whole(N, K), whole(5, K))
def helper_that_writes(u, X, W):
    for n in range(len(u)):
        axpy(X[n], W[u[n]], 2)


@loop("serial", column(N, 5), column(N, 5, seed=4), whole(5, K))
def helper_that_conflicts(u, i, W):
    for n in range(len(u)):
        axpy(W[i[n]], W[u[n]], 2)


@loop("independent", floats(N), np.zeros(N))
def library_calls(x, out):
    for n in range(len(x)):
        out[n] = math.sqrt(abs(x[n])) + np.exp(-abs(x[n]))
