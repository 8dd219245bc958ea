"""Elementwise loops and reductions."""

from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import N, column, loop, whole


@loop("independent", whole(N), whole(N), np.zeros(N, np.int64))
def elementwise(x, y, out):
    for n in range(len(x)):
        out[n] = x[n] * y[n] if x[n] > 0 else -y[n]


@loop("independent", whole(N))
def greatest_and_sum(x):
    best = -100
    total = 0
    for v in x:
        if v > best:
            best = v
        total = total + v
    return best, total


@loop("independent", whole(N))
def least(x):
    low = 100
    for v in x:
        low = min(v, low)
    return low


@loop("independent", whole(N))
def any_negative(x):
    found = False
    for v in x:
        found |= v < 0
    return found


@loop("serial", whole(N))
def position_of_greatest(x):
    best, place = -100, -1
    for n in range(len(x)):
        if x[n] > best:
            best = x[n]
            place = n
    return best, place


@loop("serial", whole(N), np.zeros(N, np.int64))
def running_sum(x, out):
    s = 0
    for n in range(len(x)):
        s += x[n]
        out[n] = s


@loop("serial", whole(N), np.zeros(N, np.int64))
def previous_value(x, out):
    last = 0
    for n in range(len(x)):
        out[n] = last
        last = x[n]


@loop("serial", whole(N))
def last_value(x):
    v = 0
    for n in range(len(x)):
        if x[n] > 0:
            v = x[n]
    return v


@loop("independent", whole(N), np.zeros(N, np.int64))
def even_and_odd(x, out):
    for n in range(0, len(x) - 1, 2):
        out[n] = x[n] + out[n + 1]


@loop("independent", whole(2 * N))
def halves(x):
    h = len(x) // 2
    for n in range(h):
        x[n] = x[n + h] + 1


@loop("serial", whole(N))
def from_the_end(x):
    for n in range(len(x)):
        x[n] = x[len(x) - 1 - n] + 1


@loop("serial", whole(N))
def wraps_around(x):
    for n in range(len(x)):
        x[n - 1] = x[n] + 1


@loop("independent", whole(N))
def from_the_first(x):
    for n in range(1, len(x)):
        x[n] = x[0] + n


@loop("serial", whole(N))
def recurrence(x):
    for n in range(1, len(x)):
        x[n] += x[n - 1]


@loop("serial", whole(N))
def reads_ahead(x):
    for n in range(len(x) - 1):
        x[n] = x[n + 1] + 1


@loop("serial", whole(N), column(N, N))
def gather_of_itself(x, p):
    for n in range(len(x)):
        x[n] = x[p[n]] + 1


@loop("1d", whole(N), column(N, 5), whole(5))
def last_writer(x, u, out):
    for n in range(len(x)):
        out[u[n]] = x[n]


@loop("1d", whole(N), column(N, 5), whole(7))
def shifted_key(x, u, out):
    for n in range(len(x)):
        out[u[n] + 2] = out[u[n] + 2] * 2 + x[n]


@loop("serial", whole(N), column(N, 5), whole(7))
def two_shifts(x, u, out):
    for n in range(len(x)):
        out[u[n] + 1] = out[u[n]] * 2 + x[n]


@loop("1d", whole(N), column(N, 11), whole(11))
def computed_key(x, u, out):
    for n in range(len(x)):
        out[(u[n] * 7 + 3) % 11] = out[(u[n] * 7 + 3) % 11] * 2 + x[n]


@loop("1d", whole(N), column(N, 5), column(5, 4), whole(4))
def key_of_key(x, u, group, out):
    for n in range(len(x)):
        out[group[u[n]]] = out[group[u[n]]] * 2 + x[n]


@loop("independent", whole(N), whole(N))
def raised_flag(x, y):
    changed = False
    for n in range(len(x)):
        if x[n] > y[n]:
            y[n] = x[n]
            changed = True
    return changed


@loop("independent", whole(N))
def lowered_flag(x):
    seen = 0
    all_positive = True
    for v in x:
        if v <= 0:
            all_positive = False
        seen += 1
    return all_positive, seen


@loop("serial", whole(N))
def flag_both_ways(x):
    is_negative = False
    for v in x:
        if v < 0:
            is_negative = True
        if v > 2:
            is_negative = False
    return is_negative


@loop("serial", whole(N), np.zeros(N, np.int64))
def flag_that_is_read(x, out):
    seen = False
    for n in range(len(x)):
        if seen:
            out[n] = 1
        if x[n] < 0:
            seen = True
