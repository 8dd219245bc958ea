"""Loops that people write, each with small data and the schedule that it should get.

Whole numbers throughout, so that results are exact whatever the order of a sum.
"""

# ruff: noqa: N803, B905, E741  (names and loops as people write them)
from __future__ import annotations

import math

import numpy as np

LOOPS = {}
N, M, K = 14, 9, 3


def loop(expected, *data, ordered=None, permit=None):
    """Register a loop: the schedule it should get, and the one with ``ordered=True``."""

    def keep(function):
        LOOPS[function.__name__] = (function, data, expected, ordered or expected, permit)
        return function

    return keep


def whole(*shape, low=-4, high=5, dtype=np.int64, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(low, high, shape).astype(dtype)


def floats(*shape, seed=0):
    return whole(*shape, dtype=np.float64, seed=seed)


def column(size, high, seed=1):
    return whole(size, low=0, high=high, seed=seed)


U, I = column(N, 5), column(N, 4, seed=2)
PTR = np.array([0, 3, 3, 7, 8, 12])
IDX = column(12, 6, seed=3)


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


# ── matrix factorisation ────────────────────────────────────────────────────────────────────────


@loop("rotation", U, I, whole(N), whole(5, K), whole(4, K), 1, ordered="serial")
def mf_scalar(u, i, v, W, H, lr):
    for n in range(len(v)):
        e = v[n]
        for k in range(W.shape[1]):
            e -= W[u[n], k] * H[i[n], k]
        for k in range(W.shape[1]):
            w = W[u[n], k]
            W[u[n], k] = (w + lr * e * H[i[n], k]) % 101
            H[i[n], k] = (H[i[n], k] + lr * e * w) % 101


@loop("rotation", U, I, whole(N), whole(5, K), whole(4, K), 1, ordered="serial")
def mf_rows(u, i, v, W, H, lr):
    for n in range(len(v)):
        w = W[u[n]]
        h = H[i[n]]
        e = v[n] - w @ h
        W[u[n]] = w + lr * e * h
        h += lr * e * w


@loop("rotation", U, I, whole(N), whole(5), whole(4), 1, ordered="serial")
def mf_biases(u, i, v, b, c, lr):
    for n, r in enumerate(v):
        e = r - b[u[n]] - c[i[n]]
        b[u[n]] += lr * e
        c[i[n]] += lr * e


@loop(
    "rotation", U, I, whole(N), whole(5, K), whole(4, K), whole(5, K), whole(4, K), ordered="serial"
)
def mf_adagrad(u, i, v, W, H, gw, gh):
    for a, b, r in zip(u, i, v):
        e = r - W[a] @ H[b]
        gw[a] += e * e
        gh[b] += e * e
        for k in range(3):
            w = W[a, k]
            W[a, k] += e * H[b, k] // (1 + abs(gw[a, k]))
            H[b, k] += e * w // (1 + abs(gh[b, k]))


@loop("rotation", PTR, IDX, whole(12), whole(5, K), whole(6, K), ordered="serial")
def mf_csr(indptr, indices, v, W, H):
    for u in range(len(indptr) - 1):
        for p in range(indptr[u], indptr[u + 1]):
            i = indices[p]
            e = v[p] - W[u] @ H[i]
            W[u] += e * H[i]
            H[i] -= e


@loop("rotation", np.stack([U, I], axis=1), whole(N), whole(5, K), whole(4, K), ordered="serial")
def mf_pairs(pairs, v, W, H):
    for n in range(len(v)):
        a, b = pairs[n]
        e = v[n] - W[a] @ H[b]
        W[a] += e * H[b]
        H[b] += e


@loop("1d", U, I, whole(N), whole(5, K), whole(4, K))
def mf_users_only(u, i, v, W, H):
    for n in range(len(v)):
        W[u[n]] += (v[n] - W[u[n]] @ H[i[n]]) * H[i[n]]


@loop("serial", U, I, whole(N), whole(5, K))
def mf_one_table(u, i, v, W):
    for n in range(len(v)):
        W[u[n]] += v[n] * W[i[n]]


# ── topic models ────────────────────────────────────────────────────────────────────────────────


def lda_counts_totals(d, w, z, nd, nw, nt, p, u):
    for n in range(len(d)):
        k = z[n]
        nd[d[n], k] -= 1
        nw[w[n], k] -= 1
        nt[k] -= 1
        total = 0
        for t in range(len(p)):
            total += (abs(nd[d[n], t]) + 1) * (abs(nw[w[n], t]) + 1)
            p[t] = total
        x = u[n] % total
        k = 0
        while p[k] <= x:
            k += 1
        z[n] = k
        nd[d[n], k] += 1
        nw[w[n], k] += 1
        nt[k] += 1


LDA = (U, I, column(N, K), whole(5, K), whole(4, K), whole(K), np.zeros(K, np.int64), column(N, 99))


@loop("rotation", *LDA, permit={"nt": "buffer"})
def lda_buffered(d, w, z, nd, nw, nt, p, u):
    for n in range(len(d)):
        k = z[n]
        nd[d[n], k] -= 1
        nw[w[n], k] -= 1
        nt[k] -= 1
        total = 0
        for t in range(len(p)):
            total += (abs(nd[d[n], t]) + 1) * (abs(nw[w[n], t]) + 1) + abs(nt[t])
            p[t] = total
        x = u[n] % total
        k = 0
        while p[k] <= x:
            k += 1
        z[n] = k
        nd[d[n], k] += 1
        nw[w[n], k] += 1
        nt[k] += 1


@loop("serial", *LDA)
def lda_reads_totals(d, w, z, nd, nw, nt, p, u):
    for n in range(len(d)):
        k = z[n]
        nd[d[n], k] -= 1
        nw[w[n], k] -= 1
        nt[k] -= 1
        total = 0
        for t in range(len(p)):
            total += (abs(nd[d[n], t]) + 1) * (abs(nw[w[n], t]) + 1) + abs(nt[t])
            p[t] = total
        x = u[n] % total
        k = 0
        while p[k] <= x:
            k += 1
        z[n] = k
        nd[d[n], k] += 1
        nw[w[n], k] += 1
        nt[k] += 1


loop("rotation", *LDA, ordered="serial")(lda_counts_totals)


@loop("1d", U, column(N, K), np.zeros((5, K), np.int64))
def count_topics_of_documents(d, z, nd):
    for n in range(len(d)):
        nd[d[n], z[n]] += 1


# ── regression, trees ───────────────────────────────────────────────────────────────────────────


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


# ── elementwise, reductions ─────────────────────────────────────────────────────────────────────


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


# ── traps ───────────────────────────────────────────────────────────────────────────────────────


@loop("serial", whole(N), N - 1)
def minus_the_index(x, c):
    for n in range(len(x)):
        x[c - n] = x[n] * 2


@loop("independent", whole(N), N - 1)
def minus_the_index_both(x, c):
    for n in range(len(x)):
        x[c - n] = x[c - n] * 2


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


@loop("independent", whole(M, K), np.zeros(M, np.int64))
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


# ── helpers ─────────────────────────────────────────────────────────────────────────────────────


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


# ── stencils ────────────────────────────────────────────────────────────────────────────────────


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


@loop("serial", whole(M, M))
def transpose_in_place(A):
    for i in range(len(A)):
        for j in range(i):
            A[i, j], A[j, i] = A[j, i], A[i, j]


# ── sparse rows ─────────────────────────────────────────────────────────────────────────────────


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


# ── loops of public reports on parallel loops that went wrong ───────────────────────────────────


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
