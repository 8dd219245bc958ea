"""Sixty plain loops for `kernels.py`: linear algebra and stencils of PolyBench's kind, sparse
matrices, graphs, images, dynamic programs, statistics. Each is written as one would in Python.

``KERNELS[name]`` is a function, a maker of its arguments for a size, and that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Maker = Callable[[int], tuple[Any, ...]]
KERNELS: dict[str, tuple[Callable[..., Any], Maker, int]] = {}
RNG = np.random.default_rng(38)


def kernel(make: Maker, size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a loop with its data."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS[function.__name__] = function, make, size
        return function

    return register


def mat(*shape: int) -> Any:
    return RNG.random(shape)


def graph(n: int, degree: int = 6) -> tuple[Any, Any]:
    """Rows of a random graph: where each begins, and the neighbours."""
    starts = np.arange(n + 1) * degree
    return starts, np.sort(RNG.integers(0, n, (n, degree)), axis=1).ravel()


# ── linear algebra ──────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (mat(n, n), mat(n, n), mat(n, n), 1.5, 1.2), 160)
def gemm(a, b, c, alpha, beta):
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            c[i, j] *= beta
        for k in range(a.shape[1]):
            for j in range(c.shape[1]):
                c[i, j] += alpha * a[i, k] * b[k, j]


@kernel(lambda n: (mat(n, n), mat(n, n), np.zeros((n, n)), np.zeros((n, n)), mat(n, n)), 110)
def two_products(a, b, t, d, c):
    n = len(a)
    for i in range(n):
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += a[i, k] * b[k, j]
            t[i, j] = s
    for i in range(n):
        for j in range(n):
            s = 0.0
            for k in range(n):
                s += t[i, k] * c[k, j]
            d[i, j] = s


@kernel(lambda n: (mat(n, n), mat(n), np.zeros(n)), 900)
def atax(a, x, y):
    m, n = a.shape
    for i in range(m):
        s = 0.0
        for j in range(n):
            s += a[i, j] * x[j]
        for j in range(n):
            y[j] += a[i, j] * s


@kernel(lambda n: (mat(n, n), mat(n), mat(n), np.zeros(n), np.zeros(n)), 900)
def bicg(a, r, p, s, q):
    for i in range(a.shape[0]):
        t = 0.0
        for j in range(a.shape[1]):
            s[j] += r[i] * a[i, j]
            t += a[i, j] * p[j]
        q[i] = t


@kernel(lambda n: (mat(n, n), mat(n), mat(n), mat(n), mat(n)), 700)
def mvt(a, x1, x2, y1, y2):
    n = len(a)
    for i in range(n):
        for j in range(n):
            x1[i] += a[i, j] * y1[j]
    for i in range(n):
        for j in range(n):
            x2[i] += a[j, i] * y2[j]


@kernel(lambda n: (mat(n, n), *(mat(n) for _ in range(4)), np.zeros(n), mat(n), np.zeros(n)), 600)
def gemver(a, u1, v1, u2, v2, x, y, w):
    n = len(a)
    for i in range(n):
        for j in range(n):
            a[i, j] = a[i, j] + u1[i] * v1[j] + u2[i] * v2[j]
    for i in range(n):
        for j in range(n):
            x[i] = x[i] + 1.2 * a[j, i] * y[j]
    for i in range(n):
        for j in range(n):
            w[i] = w[i] + 1.5 * a[i, j] * x[j]


@kernel(lambda n: (mat(n, n), mat(n, n), mat(n), np.zeros(n)), 700)
def gesummv(a, b, x, y):
    for i in range(len(x)):
        t = 0.0
        s = 0.0
        for j in range(len(x)):
            t += a[i, j] * x[j]
            s += b[i, j] * x[j]
        y[i] = 1.5 * t + 1.2 * s


@kernel(lambda n: (mat(n, n), mat(n, n)), 130)
def syrk(a, c):
    for i in range(len(c)):
        for j in range(i + 1):
            c[i, j] *= 1.2
        for k in range(a.shape[1]):
            for j in range(i + 1):
                c[i, j] += 1.5 * a[i, k] * a[j, k]


@kernel(lambda n: (mat(n, n), mat(n, n), mat(n, n)), 110)
def syr2k(a, b, c):
    for i in range(len(c)):
        for k in range(a.shape[1]):
            for j in range(i + 1):
                c[i, j] += a[j, k] * b[i, k] + b[j, k] * a[i, k]


@kernel(lambda n: (mat(n, n), mat(n, n)), 120)
def trmm(a, b):
    m, n = b.shape
    for i in range(m):
        for j in range(n):
            for k in range(i + 1, m):
                b[i, j] += a[k, i] * b[k, j]
            b[i, j] = 1.5 * b[i, j]


@kernel(lambda n: (np.tril(mat(n, n)) + n * np.eye(n), mat(n), np.zeros(n)), 900)
def trisolv(low, b, x):
    for i in range(len(x)):
        x[i] = b[i]
        for j in range(i):
            x[i] -= low[i, j] * x[j]
        x[i] = x[i] / low[i, i]


@kernel(lambda n: (mat(n, n) + n * np.eye(n),), 130)
def lu(a):
    n = len(a)
    for k in range(n):
        for i in range(k + 1, n):
            a[i, k] /= a[k, k]
            for j in range(k + 1, n):
                a[i, j] -= a[i, k] * a[k, j]


@kernel(lambda n: ((lambda m: m @ m.T + n * np.eye(n))(mat(n, n)),), 140)
def cholesky(a):
    for i in range(len(a)):
        for j in range(i):
            for k in range(j):
                a[i, j] -= a[i, k] * a[j, k]
            a[i, j] /= a[j, j]
        for k in range(i):
            a[i, i] -= a[i, k] * a[i, k]
        a[i, i] = math.sqrt(a[i, i])


@kernel(lambda n: (mat(n, n), np.zeros((n, n)), np.zeros((n, n))), 90)
def gram_schmidt(a, r, q):
    m, n = a.shape
    for k in range(n):
        nrm = 0.0
        for i in range(m):
            nrm += a[i, k] * a[i, k]
        r[k, k] = math.sqrt(nrm)
        for i in range(m):
            q[i, k] = a[i, k] / r[k, k]
        for j in range(k + 1, n):
            r[k, j] = 0.0
            for i in range(m):
                r[k, j] += q[i, k] * a[i, j]
            for i in range(m):
                a[i, j] = a[i, j] - q[i, k] * r[k, j]


@kernel(lambda n: (mat(n), np.zeros(n)), 500)
def durbin(r, y):
    n = len(r)
    z = np.zeros(n)
    y[0] = -r[0]
    beta = 1.0
    alpha = -r[0]
    for k in range(1, n):
        beta = (1 - alpha * alpha) * beta
        s = 0.0
        for i in range(k):
            s += r[k - i - 1] * y[i]
        alpha = -(r[k] + s) / beta
        for i in range(k):
            z[i] = y[i] + alpha * y[k - i - 1]
        for i in range(k):
            y[i] = z[i]
        y[k] = alpha


@kernel(lambda n: (mat(n, n // 4), np.zeros((n // 4, n // 4))), 220)
def covariance(data, cov):
    n, m = data.shape
    for i in range(m):
        for j in range(i, m):
            s = 0.0
            for k in range(n):
                s += data[k, i] * data[k, j]
            s /= n - 1.0
            cov[i, j] = s
            cov[j, i] = s


@kernel(lambda n: (mat(n, n),), 90)
def floyd_warshall(path):
    n = len(path)
    for k in range(n):
        for i in range(n):
            for j in range(n):
                if path[i, k] + path[k, j] < path[i, j]:
                    path[i, j] = path[i, k] + path[k, j]


# ── stencils ────────────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (mat(n), mat(n), 40), 8000)
def jacobi_1d(a, b, steps):
    for _ in range(steps):
        for i in range(1, len(a) - 1):
            b[i] = 0.33333 * (a[i - 1] + a[i] + a[i + 1])
        for i in range(1, len(a) - 1):
            a[i] = 0.33333 * (b[i - 1] + b[i] + b[i + 1])


@kernel(lambda n: (mat(n, n), mat(n, n), 6), 250)
def jacobi_2d(a, b, steps):
    n = len(a)
    for _ in range(steps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                b[i, j] = 0.2 * (a[i, j] + a[i, j - 1] + a[i, j + 1] + a[i + 1, j] + a[i - 1, j])
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                a[i, j] = 0.2 * (b[i, j] + b[i, j - 1] + b[i, j + 1] + b[i + 1, j] + b[i - 1, j])


@kernel(lambda n: (mat(n, n), 4), 220)
def seidel(a, steps):
    n = len(a)
    for _ in range(steps):
        for i in range(1, n - 1):
            for j in range(1, n - 1):
                a[i, j] = (
                    a[i - 1, j - 1] + a[i - 1, j] + a[i - 1, j + 1] + a[i, j - 1] + a[i, j]
                    + a[i, j + 1] + a[i + 1, j - 1] + a[i + 1, j] + a[i + 1, j + 1]
                ) / 9.0  # fmt: skip


@kernel(lambda n: (mat(n, n), mat(n, n), mat(n, n), 4), 220)
def fdtd(ex, ey, hz, steps):
    n = len(ex)
    for t in range(steps):
        for j in range(n):
            ey[0, j] = t
        for i in range(1, n):
            for j in range(n):
                ey[i, j] = ey[i, j] - 0.5 * (hz[i, j] - hz[i - 1, j])
        for i in range(n):
            for j in range(1, n):
                ex[i, j] = ex[i, j] - 0.5 * (hz[i, j] - hz[i, j - 1])
        for i in range(n - 1):
            for j in range(n - 1):
                hz[i, j] = hz[i, j] - 0.7 * (ex[i, j + 1] - ex[i, j] + ey[i + 1, j] - ey[i, j])


@kernel(lambda n: (mat(n, n, n), mat(n, n, n)), 60)
def heat_3d(a, b):
    n = len(a)
    for i in range(1, n - 1):
        for j in range(1, n - 1):
            for k in range(1, n - 1):
                b[i, j, k] = (
                    0.125 * (a[i + 1, j, k] - 2.0 * a[i, j, k] + a[i - 1, j, k])
                    + 0.125 * (a[i, j + 1, k] - 2.0 * a[i, j, k] + a[i, j - 1, k])
                    + 0.125 * (a[i, j, k + 1] - 2.0 * a[i, j, k] + a[i, j, k - 1])
                    + a[i, j, k]
                )


@kernel(lambda n: (mat(n, n), 4), 220)
def red_black(u, steps):
    n = len(u)
    for _ in range(steps):
        for colour in range(2):
            for i in range(1, n - 1):
                for j in range(1 + (i + colour) % 2, n - 1, 2):
                    u[i, j] = 0.25 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])


@kernel(lambda n: (mat(n, n), np.zeros((n, n)), mat(n), mat(n)), 300)
def adi_rows(u, v, p, q):
    n = len(u)
    for i in range(1, n - 1):
        v[0, i] = 1.0
        p[0] = 0.0
        q[0] = v[0, i]
        for j in range(1, n - 1):
            p[j] = -0.3 / (0.1 * p[j - 1] + 1.6)
            q[j] = (u[j, i - 1] - u[j, i] + u[j, i + 1] - 0.1 * q[j - 1]) / (0.1 * p[j - 1] + 1.6)
        v[n - 1, i] = 1.0
        for j in range(n - 2, 0, -1):
            v[j, i] = p[j] * v[j + 1, i] + q[j]


# ── sparse matrices ─────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (*graph(n), mat(6 * n), mat(n), np.zeros(n)), 30000)
def spmv(starts, columns, values, x, y):
    for i in range(len(y)):
        s = 0.0
        for p in range(starts[i], starts[i + 1]):
            s += values[p] * x[columns[p]]
        y[i] = s


@kernel(lambda n: (*graph(n), mat(6 * n), mat(n), np.zeros(n)), 30000)
def spmv_columns(starts, rows, values, x, y):
    for j in range(len(x)):
        for p in range(starts[j], starts[j + 1]):
            y[rows[p]] += values[p] * x[j]


@kernel(lambda n: (*graph(n), mat(6 * n), mat(n, 8), np.zeros((n, 8))), 8000)
def spmm(starts, columns, values, dense, out):
    for i in range(len(out)):
        for p in range(starts[i], starts[i + 1]):
            for k in range(dense.shape[1]):
                out[i, k] += values[p] * dense[columns[p], k]


@kernel(lambda n: (*graph(n), mat(6 * n), mat(n), np.ones(n)), 20000)
def sparse_jacobi(starts, columns, values, b, x):
    new = np.zeros(len(x))
    for i in range(len(x)):
        s = b[i]
        for p in range(starts[i], starts[i + 1]):
            if columns[p] != i:
                s -= values[p] * x[columns[p]]
        new[i] = s / 10.0
    return new


@kernel(lambda n: (RNG.integers(0, n, 8 * n), RNG.integers(0, n, 8 * n), mat(8 * n), mat(n),
                   np.zeros(n)), 12000)  # fmt: skip
def coo(rows, columns, values, x, y):
    for p in range(len(values)):
        y[rows[p]] += values[p] * x[columns[p]]


@kernel(lambda n: (RNG.integers(0, n // 10, n), mat(n), np.zeros(n // 10), np.zeros(n // 10, int)),
        150000)  # fmt: skip
def group_by(keys, values, sums, counts):
    for i in range(len(keys)):
        sums[keys[i]] += values[i]
        counts[keys[i]] += 1


# ── graphs ──────────────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (*graph(n), np.full(n, -1), np.zeros(n, int)), 20000)
def bfs(starts, neighbours, depth, queue):
    head, tail = 0, 1
    queue[0] = 0
    depth[0] = 0
    while head < tail:
        u = queue[head]
        head += 1
        for p in range(starts[u], starts[u + 1]):
            v = neighbours[p]
            if depth[v] < 0:
                depth[v] = depth[u] + 1
                queue[tail] = v
                tail += 1
    return tail


@kernel(lambda n: (*graph(n), np.full(n, 1.0 / n), 1e-4), 10000)
def page_rank(starts, sources, rank, tolerance):
    n = len(rank)
    new = np.zeros(n)
    steps = 0
    for _ in range(40):
        steps += 1
        for i in range(n):
            s = 0.0
            for p in range(starts[i], starts[i + 1]):
                s += rank[sources[p]]
            new[i] = 0.15 / n + 0.85 * s / 6.0
        change = 0.0
        for i in range(n):
            change += abs(new[i] - rank[i])
            rank[i] = new[i]
        if change < tolerance:
            break
    return steps


@kernel(lambda n: (RNG.integers(0, n, 4 * n), RNG.integers(0, n, 4 * n), mat(4 * n),
                   np.full(n, 1e9)), 3000)  # fmt: skip
def bellman_ford(tails, heads, weights, dist):
    dist[0] = 0.0
    for _ in range(len(dist)):
        changed = False
        for e in range(len(tails)):
            d = dist[tails[e]] + weights[e]
            if d < dist[heads[e]]:
                dist[heads[e]] = d
                changed = True
        if not changed:
            break


@kernel(lambda n: (RNG.integers(0, n, 3 * n), RNG.integers(0, n, 3 * n), np.arange(n)), 20000)
def components(a, b, label):
    changed = True
    while changed:
        changed = False
        for e in range(len(a)):
            if label[a[e]] < label[b[e]]:
                label[b[e]] = label[a[e]]
                changed = True
            elif label[b[e]] < label[a[e]]:
                label[a[e]] = label[b[e]]
                changed = True


@kernel(lambda n: graph(n), 6000)
def triangles(starts, neighbours):
    count = 0
    for u in range(len(starts) - 1):
        for p in range(starts[u], starts[u + 1]):
            v = neighbours[p]
            i, j = starts[u], starts[v]
            while i < starts[u + 1] and j < starts[v + 1]:
                if neighbours[i] == neighbours[j]:
                    count += 1
                    i += 1
                    j += 1
                elif neighbours[i] < neighbours[j]:
                    i += 1
                else:
                    j += 1
    return count


@kernel(lambda n: (*graph(n), np.full(n, -1)), 30000)
def colouring(starts, neighbours, colour):
    used = np.zeros(16, dtype=np.int64)
    for u in range(len(colour)):
        for k in range(16):
            used[k] = 0
        for p in range(starts[u], starts[u + 1]):
            c = colour[neighbours[p]]
            if 0 <= c < 16:
                used[c] = 1
        for k in range(16):
            if used[k] == 0:
                colour[u] = k
                break


@kernel(lambda n: (*graph(n), np.zeros(n, bool)), 30000)
def independent_set(starts, neighbours, chosen):
    for u in range(len(chosen)):
        free = True
        for p in range(starts[u], starts[u + 1]):
            if chosen[neighbours[p]]:
                free = False
                break
        chosen[u] = free


# ── images ──────────────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (RNG.integers(0, 256, (n, n), dtype=np.uint8), np.zeros((n, n), np.uint8)), 350)
def box_blur(image, out):
    h, w = image.shape
    for i in range(1, h - 1):
        for j in range(1, w - 1):
            s = 0
            for di in range(-1, 2):
                for dj in range(-1, 2):
                    s += int(image[i + di, j + dj])
            out[i, j] = s // 9


@kernel(lambda n: (mat(n, n), np.zeros((n, n))), 400)
def sobel(image, out):
    h, w = image.shape
    for i in range(1, h - 1):
        for j in range(1, w - 1):
            gx = image[i - 1, j + 1] + 2.0 * image[i, j + 1] + image[i + 1, j + 1]
            gx -= image[i - 1, j - 1] + 2.0 * image[i, j - 1] + image[i + 1, j - 1]
            gy = image[i + 1, j - 1] + 2.0 * image[i + 1, j] + image[i + 1, j + 1]
            gy -= image[i - 1, j - 1] + 2.0 * image[i - 1, j] + image[i - 1, j + 1]
            out[i, j] = math.sqrt(gx * gx + gy * gy)


@kernel(lambda n: (mat(n, n), mat(5, 5), np.zeros((n, n))), 200)
def convolve(image, weights, out):
    h, w = image.shape
    for i in range(2, h - 2):
        for j in range(2, w - 2):
            s = 0.0
            for k in range(5):
                for m in range(5):
                    s += weights[k, m] * image[i + k - 2, j + m - 2]
            out[i, j] = s


@kernel(lambda n: (RNG.integers(0, 256, (n, n), dtype=np.uint8), np.zeros(256, int)), 400)
def histogram(image, counts):
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            counts[image[i, j]] += 1


@kernel(lambda n: (RNG.integers(0, 256, (n, n, 3), dtype=np.uint8), np.zeros((n, n), np.uint8)),
        300)  # fmt: skip
def grey(image, out):
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            r, g, b = image[i, j, 0], image[i, j, 1], image[i, j, 2]
            out[i, j] = int(0.299 * r + 0.587 * g + 0.114 * b)


@kernel(lambda n: (RNG.integers(0, 2, (n, n)), np.zeros((n, n), int)), 250)
def life(cells, out):
    h, w = cells.shape
    for i in range(h):
        for j in range(w):
            alive = 0
            for di in range(-1, 2):
                for dj in range(-1, 2):
                    if di != 0 or dj != 0:
                        alive += cells[(i + di) % h, (j + dj) % w]
            out[i, j] = 1 if alive == 3 or (alive == 2 and cells[i, j] == 1) else 0


@kernel(lambda n: (mat(n, n), np.zeros((n, n))), 300)
def integral_image(image, out):
    h, w = image.shape
    for i in range(h):
        row = 0.0
        for j in range(w):
            row += image[i, j]
            out[i, j] = row + (out[i - 1, j] if i > 0 else 0.0)


@kernel(lambda n: (mat(n, n),), 300)
def dither(image):
    h, w = image.shape
    for i in range(h - 1):
        for j in range(1, w - 1):
            old = image[i, j]
            new = 1.0 if old > 0.5 else 0.0
            image[i, j] = new
            e = old - new
            image[i, j + 1] += e * 7 / 16
            image[i + 1, j - 1] += e * 3 / 16
            image[i + 1, j] += e * 5 / 16
            image[i + 1, j + 1] += e / 16


@kernel(lambda n: (mat(n, n), np.zeros((n, n))), 150)
def median_3x3(image, out):
    h, w = image.shape
    window = np.zeros(9)
    for i in range(1, h - 1):
        for j in range(1, w - 1):
            for k in range(9):
                window[k] = image[i - 1 + k // 3, j - 1 + k % 3]
            for a in range(1, 9):
                x = window[a]
                b = a - 1
                while b >= 0 and window[b] > x:
                    window[b + 1] = window[b]
                    b -= 1
                window[b + 1] = x
            out[i, j] = window[4]


@kernel(lambda n: (mat(n, n) > 0.6, np.zeros((n, n))), 300)
def distance_transform(mask, out):
    h, w = mask.shape
    for i in range(h):
        for j in range(w):
            if mask[i, j]:
                out[i, j] = 0.0
            else:
                best = 1e9
                if i > 0:
                    best = min(best, out[i - 1, j] + 1.0)
                if j > 0:
                    best = min(best, out[i, j - 1] + 1.0)
                out[i, j] = best


@kernel(lambda n: (n, 50, np.zeros((n, n), int)), 120)
def julia(n, limit, out):
    for i in range(n):
        for j in range(n):
            x = -1.5 + 3.0 * i / n
            y = -1.5 + 3.0 * j / n
            k = 0
            while x * x + y * y < 4.0 and k < limit:
                x, y = x * x - y * y - 0.4, 2.0 * x * y + 0.6
                k += 1
            out[i, j] = k


# ── dynamic programs, statistics, particles ─────────────────────────────────────────────────────


@kernel(lambda n: (RNG.integers(1, 40, n // 10), mat(n // 10), np.zeros((n // 10 + 1, n + 1))),
        1500)  # fmt: skip
def knapsack(weights, values, dp):
    for i in range(1, len(weights) + 1):
        w = weights[i - 1]
        for c in range(dp.shape[1]):
            best = dp[i - 1, c]
            if c >= w:
                taken = dp[i - 1, c - w] + values[i - 1]
                if taken > best:
                    best = taken
            dp[i, c] = best


@kernel(lambda n: (RNG.integers(0, 4, n), RNG.integers(0, 4, n), np.zeros((n + 1, n + 1), int)),
        400)  # fmt: skip
def lcs(a, b, dp):
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            if a[i - 1] == b[j - 1]:
                dp[i, j] = dp[i - 1, j - 1] + 1
            else:
                dp[i, j] = max(dp[i - 1, j], dp[i, j - 1])
    return dp[len(a), len(b)]


@kernel(lambda n: (RNG.integers(5, 50, n), np.zeros((n, n))), 100)
def matrix_chain(sizes, cost):
    n = len(sizes) - 1
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            best = 1e18
            for k in range(i, j):
                q = cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
                if q < best:
                    best = q
            cost[i, j] = best


@kernel(lambda n: (np.log(mat(8, 8)), np.log(mat(8, 5)), RNG.integers(0, 5, n), np.zeros((n, 8))),
        4000)  # fmt: skip
def viterbi(moves, emits, seen, score):
    for t in range(1, len(seen)):
        for s in range(moves.shape[0]):
            best = -1e300
            for r in range(moves.shape[0]):
                v = score[t - 1, r] + moves[r, s]
                if v > best:
                    best = v
            score[t, s] = best + emits[s, seen[t]]


@kernel(lambda n: (mat(n, 8), mat(12, 8), np.zeros(n, int)), 4000)
def k_means(points, centres, label):
    for i in range(len(points)):
        best = 1e300
        for k in range(len(centres)):
            d = 0.0
            for j in range(points.shape[1]):
                t = points[i, j] - centres[k, j]
                d += t * t
            if d < best:
                best = d
                label[i] = k


@kernel(lambda n: (mat(n, 3), np.zeros((n, 3)), mat(n)), 400)
def n_body(place, force, mass):
    for i in range(len(place)):
        for j in range(len(place)):
            if i != j:
                dx = place[j, 0] - place[i, 0]
                dy = place[j, 1] - place[i, 1]
                dz = place[j, 2] - place[i, 2]
                r = dx * dx + dy * dy + dz * dz + 1e-3
                f = mass[j] / (r * math.sqrt(r))
                force[i, 0] += f * dx
                force[i, 1] += f * dy
                force[i, 2] += f * dz


@kernel(lambda n: (mat(n), 20, np.zeros(n)), 50000)
def moving_average(x, width, out):
    s = 0.0
    for i in range(len(x)):
        s += x[i]
        if i >= width:
            s -= x[i - width]
        out[i] = s / width


@kernel(lambda n: (mat(n, 20), np.zeros((n, 20))), 4000)
def softmax(x, y):
    for i in range(len(x)):
        e = np.exp(x[i] - x[i].max())
        y[i] = e / e.sum()


@kernel(lambda n: (mat(n, 16).astype(np.float32), mat(n, 16).astype(np.float32), mat(16),
                   np.zeros(n, np.float32)), 6000)  # fmt: skip
def weighted_distance(a, b, weights, out):
    for i in range(len(a)):
        s = np.float32(0.0)
        for k in range(a.shape[1]):
            d = a[i, k] - b[i, k]
            s += d * d
        out[i] = math.sqrt(s) * weights[i % 16]


@kernel(lambda n: (np.linspace(0.0, 1.0, n), 0.6), 60000)
def first_above(x, limit):
    for i in range(len(x)):
        if x[i] > limit:
            return i, x[i]
    return -1, 0.0


@kernel(lambda n: (mat(n), np.linspace(0, 1, 33), np.zeros(32, int)), 40000)
def binned(x, edges, counts):
    for i in range(len(x)):
        low, high = 0, len(edges) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if x[i] < edges[middle]:
                high = middle
            else:
                low = middle
        counts[low] += 1


@kernel(lambda n: (n, np.ones(n + 1, bool)), 100000)
def sieve(n, prime):
    prime[0] = prime[1] = False
    i = 2
    while i * i <= n:
        if prime[i]:
            for k in range(i * i, n + 1, i):
                prime[k] = False
        i += 1
