"""Matrix factorisation."""

# ruff: noqa: N803, B905  (names and loops as people write them)
from __future__ import annotations

import numpy as np
from loops.catalogue_parts.register import IDX, PTR, I, K, N, U, loop, whole


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
