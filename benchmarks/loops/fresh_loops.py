"""Sixty more loops that no test has, drawn on 2026-11-18 after the analysis was last changed.

PolyBench, graphs, sparse matrices, images, dynamic programming and statistics, each as people write
it. `kernels.py --fresh` checks and times them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_loops import RNG, Maker, graph, mat

FRESH: dict[str, tuple[Any, Maker, int]] = {}


def kernel(make: Maker, size: int) -> Any:
    def keep(function: Any) -> Any:
        FRESH[function.__name__] = function, make, size
        return function

    return keep


def ints(low: int, high: int, *shape: int) -> Any:
    return RNG.integers(low, high, shape)


# ── PolyBench ───────────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (mat(n, n), mat(n, n), np.zeros((n, n))), 110)
def symm(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for k in range(i):
                c[k, j] += b[i, j] * a[i, k]
                total += b[k, j] * a[i, k]
            c[i, j] = 0.5 * c[i, j] + b[i, j] * a[i, i] + total


@kernel(lambda n: (mat(n, n, 12), mat(12, 12), np.zeros(12)), 60)
def doitgen(a, c4, scratch):
    for r in range(a.shape[0]):
        for q in range(a.shape[1]):
            for p in range(12):
                scratch[p] = 0.0
                for s in range(12):
                    scratch[p] += a[r, q, s] * c4[s, p]
            for p in range(12):
                a[r, q, p] = scratch[p]


@kernel(lambda n: (mat(n, n // 3), np.zeros((n // 3, n // 3))), 200)
def correlation(data, corr):
    n, m = data.shape
    mean = np.zeros(m)
    for j in range(m):
        for i in range(n):
            mean[j] += data[i, j]
        mean[j] /= n
    for i in range(m):
        for j in range(i, m):
            total = 0.0
            for k in range(n):
                total += (data[k, i] - mean[i]) * (data[k, j] - mean[j])
            corr[i, j] = total
            corr[j, i] = total


@kernel(lambda n: (mat(n, n) + n * np.eye(n), mat(n), np.zeros(n), np.zeros(n)), 110)
def ludcmp(a, b, x, y):
    n = len(b)
    for i in range(n):
        for j in range(i):
            w = a[i, j]
            for k in range(j):
                w -= a[i, k] * a[k, j]
            a[i, j] = w / a[j, j]
        for j in range(i, n):
            w = a[i, j]
            for k in range(i):
                w -= a[i, k] * a[k, j]
            a[i, j] = w
    for i in range(n):
        w = b[i]
        for j in range(i):
            w -= a[i, j] * y[j]
        y[i] = w
    for i in range(n - 1, -1, -1):
        w = y[i]
        for j in range(i + 1, n):
            w -= a[i, j] * x[j]
        x[i] = w / a[i, i]


@kernel(lambda n: (ints(0, 4, n), np.zeros((n, n), int)), 90)
def nussinov(sequence, score):
    n = len(sequence)
    for i in range(n - 1, -1, -1):
        for j in range(i + 1, n):
            best = score[i, j - 1]
            if score[i + 1, j] > best:
                best = score[i + 1, j]
            if i < j - 1:
                pair = score[i + 1, j - 1] + (1 if sequence[i] + sequence[j] == 3 else 0)
                if pair > best:
                    best = pair
            for k in range(i + 1, j):
                if score[i, k] + score[k + 1, j] > best:
                    best = score[i, k] + score[k + 1, j]
            score[i, j] = best


@kernel(lambda n: (mat(n, n), np.zeros((n, n)), np.zeros((n, n)), 0.25), 250)
def deriche_rows(image, forward, backward, a):
    h, w = image.shape
    for i in range(h):
        last = 0.0
        for j in range(w):
            last = a * image[i, j] + (1 - a) * last
            forward[i, j] = last
        last = 0.0
        for j in range(w - 1, -1, -1):
            last = a * image[i, j] + (1 - a) * last
            backward[i, j] = last + forward[i, j]


@kernel(lambda n: (mat(n, n), mat(n, n), np.zeros((n, n))), 110)
def three_loops_jki(a, b, c):
    n = len(a)
    for j in range(n):
        for k in range(n):
            for i in range(n):
                c[i, j] += a[i, k] * b[k, j]


@kernel(lambda n: (mat(n, n, n), np.zeros((n, n, n))), 60)
def laplace_3d(u, out):
    n = len(u)
    for i in range(1, n - 1):
        for j in range(1, n - 1):
            for k in range(1, n - 1):
                out[i, j, k] = (u[i - 1, j, k] + u[i + 1, j, k] + u[i, j - 1, k] + u[i, j + 1, k]
                                + u[i, j, k - 1] + u[i, j, k + 1] - 6 * u[i, j, k])  # fmt: skip


@kernel(lambda n: (mat(n, n), np.zeros(n)), 700)
def row_norms(a, out):
    for i in range(len(a)):
        total = 0.0
        for j in range(a.shape[1]):
            total += a[i, j] * a[i, j]
        out[i] = np.sqrt(total)


@kernel(lambda n: (mat(n, n),), 500)
def scale_columns(a):
    n, m = a.shape
    for j in range(m):
        high = 0.0
        for i in range(n):
            high = max(high, abs(a[i, j]))
        for i in range(n):
            a[i, j] /= high


@kernel(lambda n: (mat(n, n) + n * np.eye(n), mat(n, 4)), 130)
def gauss(a, b):
    n = len(a)
    for k in range(n - 1):
        for i in range(k + 1, n):
            factor = a[i, k] / a[k, k]
            for j in range(k, n):
                a[i, j] -= factor * a[k, j]
            for j in range(4):
                b[i, j] -= factor * b[k, j]


@kernel(lambda n: (mat(n, n), np.zeros((n, n))), 400)
def transpose(a, out):
    for i in range(len(a)):
        for j in range(a.shape[1]):
            out[j, i] = a[i, j]


@kernel(lambda n: (mat(n, n),), 400)
def symmetrise(a):
    for i in range(len(a)):
        for j in range(i):
            mean = 0.5 * (a[i, j] + a[j, i])
            a[i, j] = mean
            a[j, i] = mean


@kernel(lambda n: (mat(n), np.zeros((n, n))), 400)
def toeplitz(first, out):
    for i in range(len(out)):
        for j in range(len(out)):
            out[i, j] = first[abs(i - j)]


@kernel(lambda n: (mat(n, n), mat(n)), 400)
def rank_one_update(a, u):
    for i in range(len(a)):
        for j in range(len(a)):
            a[i, j] += u[i] * u[j]


@kernel(lambda n: (mat(n), mat(n), np.zeros(2 * n - 1)), 700)
def polynomial_product(p, q, out):
    for i in range(len(p)):
        for j in range(len(q)):
            out[i + j] += p[i] * q[j]


@kernel(lambda n: (mat(n), 0.3), 60000)
def horner(c, x):
    value = 0.0
    for i in range(len(c) - 1, -1, -1):
        value = value * x + c[i]
    return value


# ── sparse and graphs ───────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (*graph(n), mat(6 * n), mat(n), np.zeros(n)), 20000)
def row_sums_of_squares(starts, columns, values, scale, out):
    for i in range(len(starts) - 1):
        for e in range(starts[i], starts[i + 1]):
            out[i] += (values[e] * scale[columns[e]]) ** 2


@kernel(lambda n: (*graph(n), np.zeros(n, int)), 30000)
def in_degree(starts, neighbours, degree):
    for e in range(len(neighbours)):
        degree[neighbours[e]] += 1


@kernel(lambda n: (*graph(n), mat(n), np.zeros(n)), 20000)
def neighbour_max(starts, neighbours, value, out):
    for v in range(len(out)):
        best = -1.0
        for e in range(starts[v], starts[v + 1]):
            if value[neighbours[e]] > best:
                best = value[neighbours[e]]
        out[v] = best


@kernel(lambda n: (*graph(n), np.arange(n)), 10000)
def label_propagation(starts, neighbours, label):
    changed = True
    rounds = 0
    while changed and rounds < 5:
        changed = False
        for v in range(len(label)):
            for e in range(starts[v], starts[v + 1]):
                if label[neighbours[e]] < label[v]:
                    label[v] = label[neighbours[e]]
                    changed = True
        rounds += 1
    return rounds


@kernel(lambda n: (*graph(n), np.zeros(n), np.zeros(n)), 8000)
def hits(starts, neighbours, hub, authority):
    n = len(hub)
    for v in range(n):
        hub[v] = 1.0
    for _ in range(3):
        for v in range(n):
            authority[v] = 0.0
        for v in range(n):
            for e in range(starts[v], starts[v + 1]):
                authority[neighbours[e]] += hub[v]
        for v in range(n):
            total = 0.0
            for e in range(starts[v], starts[v + 1]):
                total += authority[neighbours[e]]
            hub[v] = total / n


@kernel(lambda n: (*graph(n), RNG.random(n) > 0.5, np.zeros(n, int)), 20000)
def cut_size(starts, neighbours, side, out):
    total = 0
    for v in range(len(side)):
        count = 0
        for e in range(starts[v], starts[v + 1]):
            if side[v] != side[neighbours[e]]:
                count += 1
        out[v] = count
        total += count
    return total


@kernel(lambda n: (*graph(n), np.zeros(n, bool), np.zeros(7 * n, int)), 15000)
def depth_first(starts, neighbours, seen, stack):
    top = 1
    visited = 0
    while top > 0:
        top -= 1
        v = stack[top]
        if seen[v]:
            continue
        seen[v] = True
        visited += 1
        for e in range(starts[v], starts[v + 1]):
            if not seen[neighbours[e]]:
                stack[top] = neighbours[e]
                top += 1
    return visited


@kernel(lambda n: (ints(0, n, 3 * n), ints(0, n, 3 * n), np.arange(n)), 8000)
def union_find(a, b, parent):
    merged = 0
    for e in range(len(a)):
        x, y = a[e], b[e]
        while parent[x] != x:
            x = parent[x]
        while parent[y] != y:
            y = parent[y]
        if x != y:
            parent[max(x, y)] = min(x, y)
            merged += 1
    return merged


@kernel(lambda n: (ints(0, n, 4 * n), ints(0, n, 4 * n), mat(4 * n), np.zeros((n, 4))), 10000)
def edge_features(a, b, weight, out):
    for e in range(len(a)):
        for k in range(4):
            out[a[e], k] += weight[e] * k
            out[b[e], k] -= weight[e]


@kernel(lambda n: (mat(n, n), np.full(n, 1e9), np.zeros(n, bool)), 160)
def dijkstra_dense(weights, dist, done):
    n = len(dist)
    dist[0] = 0.0
    for _ in range(n):
        u = -1
        for v in range(n):
            if not done[v] and (u < 0 or dist[v] < dist[u]):
                u = v
        done[u] = True
        for v in range(n):
            if dist[u] + weights[u, v] < dist[v]:
                dist[v] = dist[u] + weights[u, v]


@kernel(lambda n: (RNG.random((n, n)) < 0.05,), 110)
def transitive_closure(reach):
    n = len(reach)
    for k in range(n):
        for i in range(n):
            if reach[i, k]:
                for j in range(n):
                    if reach[k, j]:
                        reach[i, j] = True


@kernel(lambda n: (ints(0, n, n), mat(n), np.zeros(n)), 60000)
def gather(index, values, out):
    for i in range(len(index)):
        out[i] = values[index[i]] * 2.0


@kernel(lambda n: (RNG.permutation(n), mat(n), np.zeros(n)), 60000)
def scatter(index, values, out):
    for i in range(len(index)):
        out[index[i]] = values[i]


# ── images ──────────────────────────────────────────────────────────────────────────────────────


@kernel(lambda n: (ints(0, 256, n, n).astype(np.uint8), np.zeros((n, n), np.uint8), 128), 400)
def threshold(image, out, level):
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            out[i, j] = 255 if image[i, j] > level else 0


@kernel(lambda n: (RNG.random((n, n)) > 0.5, np.zeros((n, n), bool)), 250)
def erode(mask, out):
    h, w = mask.shape
    for i in range(1, h - 1):
        for j in range(1, w - 1):
            keep = True
            for di in range(-1, 2):
                for dj in range(-1, 2):
                    if not mask[i + di, j + dj]:
                        keep = False
            out[i, j] = keep


@kernel(lambda n: (mat(n, n), np.zeros((n // 2, n // 2))), 400)
def downsample(image, out):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            y, x = 2 * i, 2 * j
            upper, lower = image[y, x] + image[y, x + 1], image[y + 1, x] + image[y + 1, x + 1]
            out[i, j] = 0.25 * (upper + lower)


@kernel(lambda n: (mat(n, n), np.zeros((2 * n, 2 * n))), 200)
def upsample(image, out):
    for i in range(len(image)):
        for j in range(image.shape[1]):
            for a in range(2):
                for b in range(2):
                    out[2 * i + a, 2 * j + b] = image[i, j]


@kernel(lambda n: (mat(n, n), 0.4, np.zeros((n, n))), 250)
def rotate_image(image, angle, out):
    h, w = image.shape
    c, s = np.cos(angle), np.sin(angle)
    for i in range(h):
        for j in range(w):
            y = int(c * (i - h // 2) - s * (j - w // 2)) + h // 2
            x = int(s * (i - h // 2) + c * (j - w // 2)) + w // 2
            if 0 <= y < h and 0 <= x < w:
                out[i, j] = image[y, x]


@kernel(lambda n: (mat(n, n, 3), np.zeros((n, n, 3))), 150)
def colour_matrix(image, out):
    weights = np.array([[0.4, 0.7, 0.2], [0.3, 0.6, 0.1], [0.2, 0.5, 0.1]])
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            for k in range(3):
                out[i, j, k] = 0.0
                for m in range(3):
                    out[i, j, k] += weights[k, m] * image[i, j, m]


@kernel(lambda n: (ints(0, 256, n, n), np.zeros(256), np.zeros((n, n), int)), 300)
def equalise(image, cumulated, out):
    h, w = image.shape
    for i in range(h):
        for j in range(w):
            cumulated[image[i, j]] += 1
    for k in range(1, 256):
        cumulated[k] += cumulated[k - 1]
    for i in range(h):
        for j in range(w):
            out[i, j] = int(255 * cumulated[image[i, j]] / (h * w))


@kernel(lambda n: (mat(n, n), np.zeros((n, n)), 3, 0.2), 90)
def bilateral(image, out, radius, sigma):
    h, w = image.shape
    for i in range(radius, h - radius):
        for j in range(radius, w - radius):
            total, weight = 0.0, 0.0
            for a in range(-radius, radius + 1):
                for b in range(-radius, radius + 1):
                    apart = image[i + a, j + b] - image[i, j]
                    g = 1.0 / (1.0 + apart * apart / sigma)
                    total += g * image[i + a, j + b]
                    weight += g
            out[i, j] = total / weight


@kernel(lambda n: (mat(n, n), np.zeros(n), np.zeros(n)), 400)
def projections(image, rows, columns):
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            rows[i] += image[i, j]
            columns[j] += image[i, j]


@kernel(lambda n: (mat(n, n), 10), 120)
def diffuse(u, steps):
    n, m = u.shape
    for _ in range(steps):
        old = u.copy()
        for i in range(1, n - 1):
            for j in range(1, m - 1):
                u[i, j] = old[i, j] + 0.1 * (old[i - 1, j] + old[i + 1, j] + old[i, j - 1]
                                             + old[i, j + 1] - 4 * old[i, j])  # fmt: skip


@kernel(lambda n: (ints(0, 2, n), np.zeros((n // 4, n), int)), 400)
def rule_30(first, rows):
    n = len(first)
    for j in range(n):
        rows[0, j] = first[j]
    for i in range(1, len(rows)):
        for j in range(n):
            left, right = rows[i - 1, (j - 1) % n], rows[i - 1, (j + 1) % n]
            rows[i, j] = left ^ (rows[i - 1, j] | right)


# ── dynamic programming, strings, statistics ────────────────────────────────────────────────────


@kernel(lambda n: (ints(0, 4, n), ints(0, 4, n), np.arange(n + 1), np.zeros(n + 1, int)), 220)
def levenshtein_in_two_rows(a, b, before, now):
    for i in range(len(a)):
        now[0] = i + 1
        for j in range(len(b)):
            change = before[j] + (0 if a[i] == b[j] else 1)
            now[j + 1] = min(change, before[j + 1] + 1, now[j] + 1)
        for j in range(len(b) + 1):
            before[j] = now[j]
    return before[len(b)]


@kernel(lambda n: (ints(0, 4, n), ints(0, 4, n), np.zeros((n + 1, n + 1))), 200)
def smith_waterman(a, b, h):
    best = 0.0
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            match = h[i - 1, j - 1] + (2.0 if a[i - 1] == b[j - 1] else -1.0)
            h[i, j] = max(0.0, match, h[i - 1, j] - 1.0, h[i, j - 1] - 1.0)
            if h[i, j] > best:
                best = h[i, j]
    return best


@kernel(lambda n: (np.array([1, 5, 10, 25, 50]), np.zeros(n + 1, int)), 20000)
def coin_ways(coins, count):
    count[0] = 1
    for c in range(len(coins)):
        for amount in range(coins[c], len(count)):
            count[amount] += count[amount - coins[c]]


@kernel(lambda n: (mat(n), np.zeros(n, int)), 400)
def longest_increasing(x, length):
    best = 0
    for i in range(len(x)):
        length[i] = 1
        for j in range(i):
            if x[j] < x[i] and length[j] + 1 > length[i]:
                length[i] = length[j] + 1
        best = max(best, length[i])
    return best


@kernel(lambda n: (mat(n, n),), 200)
def cheapest_path(cost):
    h, w = cost.shape
    for i in range(1, h):
        for j in range(w):
            best = cost[i - 1, j]
            if j > 0:
                best = min(best, cost[i - 1, j - 1])
            if j < w - 1:
                best = min(best, cost[i - 1, j + 1])
            cost[i, j] += best
    return cost[h - 1].min()


@kernel(lambda n: (mat(n), mat(n), np.full((n + 1, n + 1), 1e9)), 150)
def time_warp(a, b, d):
    d[0, 0] = 0.0
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            d[i, j] = abs(a[i - 1] - b[j - 1]) + min(d[i - 1, j], d[i, j - 1], d[i - 1, j - 1])


@kernel(lambda n: (mat(n),), 60000)
def best_segment(x):
    best = now = x[0]
    for i in range(1, len(x)):
        now = max(x[i], now + x[i])
        best = max(best, now)
    return best


@kernel(lambda n: (mat(n, 3), np.zeros((n, n))), 200)
def distances(points, out):
    n = len(points)
    for i in range(n):
        for j in range(i + 1, n):
            total = 0.0
            for k in range(3):
                total += (points[i, k] - points[j, k]) ** 2
            out[i, j] = np.sqrt(total)
            out[j, i] = out[i, j]


@kernel(lambda n: (mat(n, 8), mat(8), mat(n), 0.01), 8000)
def sgd_regression(x, w, y, rate):
    for i in range(len(x)):
        error = -y[i]
        for k in range(8):
            error += x[i, k] * w[k]
        for k in range(8):
            w[k] -= rate * error * x[i, k]


@kernel(lambda n: (mat(n, 8), mat(n), mat(8), np.zeros(8)), 15000)
def gradient(x, y, w, out):
    for i in range(len(x)):
        error = -y[i]
        for k in range(8):
            error += x[i, k] * w[k]
        for k in range(8):
            out[k] += error * x[i, k]


@kernel(lambda n: (mat(n, 6), np.zeros((6, 6))), 12000)
def gram(x, out):
    for i in range(len(x)):
        for a in range(6):
            for b in range(6):
                out[a, b] += x[i, a] * x[i, b]


@kernel(lambda n: (mat(n),), 60000)
def mean_and_variance(x):
    mean, total = 0.0, 0.0
    for i in range(len(x)):
        apart = x[i] - mean
        mean += apart / (i + 1)
        total += apart * (x[i] - mean)
    return mean, total


@kernel(lambda n: (mat(n), np.zeros(n), 0.1), 60000)
def smooth(x, out, a):
    out[0] = x[0]
    for i in range(1, len(x)):
        out[i] = a * x[i] + (1 - a) * out[i - 1]


@kernel(lambda n: (mat(n),), 700)
def insertion_sort(x):
    for i in range(1, len(x)):
        value = x[i]
        j = i - 1
        while j >= 0 and x[j] > value:
            x[j + 1] = x[j]
            j -= 1
        x[j + 1] = value


@kernel(lambda n: (mat(n, n // 20), np.zeros((n, n // 20)), np.zeros((n // 20, n // 20))), 300)
def outer_products(x, out, scratch):
    n, k = x.shape
    for i in range(n):
        for a in range(k):
            for b in range(k):
                scratch[a, b] = x[i, a] * x[i, b]
        for a in range(k):
            total = 0.0
            for b in range(k):
                total += scratch[b, a]
            out[i, a] = total


@kernel(lambda n: (mat(n), mat(n)), 40000)
def clip_and_tell(x, high):
    changed = False
    for i in range(len(x)):
        if x[i] > high[i]:
            x[i] = high[i]
            changed = True
    return changed


@kernel(lambda n: (np.sort(mat(n)), mat(n), np.zeros(n, int)), 15000)
def binary_search(keys, wanted, out):
    for i in range(len(wanted)):
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] < wanted[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low


@kernel(lambda n: (mat(n, 2), 0.3), 350)
def pairs_within(points, radius):
    count = 0
    for i in range(len(points)):
        for j in range(i + 1, len(points)):
            dx, dy = points[i, 0] - points[j, 0], points[i, 1] - points[j, 1]
            if dx * dx + dy * dy < radius * radius:
                count += 1
    return count


@kernel(lambda n: (mat(n), mat(n), mat(n), np.zeros(n)), 20000)
def tridiagonal(a, b, d, x):
    n = len(d)
    c = np.zeros(n)
    c[0] = a[0] / (2.0 + b[0])
    x[0] = d[0] / (2.0 + b[0])
    for i in range(1, n):
        m = 1.0 / (2.0 + b[i] - 0.1 * c[i - 1])
        c[i] = a[i] * m
        x[i] = (d[i] - 0.1 * x[i - 1]) * m
    for i in range(n - 2, -1, -1):
        x[i] -= c[i] * x[i + 1]
