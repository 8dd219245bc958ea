"""Matrix factorisation of ratings on all cores: SGD, AdaGrad, biases; the same bits in every run.

python examples/loops_mf.py ratings.csv --rank 32 --epochs 5 --method adagrad
"""

from __future__ import annotations

import argparse
import time

import loops_data
import numpy as np

import hocket


@hocket.parallel_for(fastmath=True)
def sgd(u, i, v, W, H, rate, decay):
    for n in range(len(v)):
        a = u[n]
        b = i[n]
        e = v[n]
        for k in range(W.shape[1]):
            e -= W[a, k] * H[b, k]
        for k in range(W.shape[1]):
            w = W[a, k]
            W[a, k] += rate * (e * H[b, k] - decay * w)
            H[b, k] += rate * (e * w - decay * H[b, k])


@hocket.parallel_for(fastmath=True)
def sgd_biases(u, i, v, W, H, bu, bi, mean, rate, decay):
    for n in range(len(v)):
        a = u[n]
        b = i[n]
        e = v[n] - mean - bu[a] - bi[b]
        for k in range(W.shape[1]):
            e -= W[a, k] * H[b, k]
        bu[a] += rate * (e - decay * bu[a])
        bi[b] += rate * (e - decay * bi[b])
        for k in range(W.shape[1]):
            w = W[a, k]
            W[a, k] += rate * (e * H[b, k] - decay * w)
            H[b, k] += rate * (e * w - decay * H[b, k])


@hocket.parallel_for(fastmath=True)
def adagrad(u, i, v, W, H, gw, gh, rate, decay):
    """One accumulated squared gradient per row, as LIBMF keeps it."""
    for n in range(len(v)):
        a = u[n]
        b = i[n]
        e = v[n]
        for k in range(W.shape[1]):
            e -= W[a, k] * H[b, k]
        rate_w = rate / np.sqrt(gw[a])
        rate_h = rate / np.sqrt(gh[b])
        sum_w = e * 0
        sum_h = e * 0
        for k in range(W.shape[1]):
            w = W[a, k]
            h = H[b, k]
            dw = e * h - decay * w
            dh = e * w - decay * h
            sum_w += dw * dw
            sum_h += dh * dh
            W[a, k] = w + rate_w * dw
            H[b, k] = h + rate_h * dh
        gw[a] += sum_w / W.shape[1]
        gh[b] += sum_h / W.shape[1]


@hocket.parallel_for(fastmath=True)
def squared_error(u, i, v, W, H):
    total = 0.0
    for n in range(len(v)):
        e = v[n]
        for k in range(W.shape[1]):
            e -= W[u[n], k] * H[i[n], k]
        total += e * e
    return total


def made_up(num_ratings=200_000, users=3000, items=2000, seed=0):
    rng = np.random.default_rng(seed)
    u, i = rng.integers(0, users, num_ratings), rng.integers(0, items, num_ratings)
    W, H = rng.normal(size=(users, 8)) * 0.6, rng.normal(size=(items, 8)) * 0.6
    v = (W[u] * H[i]).sum(axis=1) + rng.normal(size=num_ratings) * 0.3
    return u.astype(np.int32), i.astype(np.int32), v.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ratings", nargs="?", help="CSV of user,item,rating; made up if left out")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--method", choices=["sgd", "biases", "adagrad"], default="sgd")
    parser.add_argument("--rate", type=float, default=0.05, help="step size of SGD at first")
    parser.add_argument("--fall", type=float, default=0.8, help="its factor from epoch to epoch")
    options = parser.parse_args()
    u, i, v = loops_data.ratings(options.ratings) if options.ratings else made_up()
    mean = np.float32(v.mean())
    rng = np.random.default_rng(1)
    shuffled = rng.permutation(len(v))
    u, i, v = u[shuffled], i[shuffled], v[shuffled]
    scale = np.float32(1 / np.sqrt(options.rank))
    W = rng.random((u.max() + 1, options.rank), dtype=np.float32) * scale
    H = rng.random((i.max() + 1, options.rank), dtype=np.float32) * scale
    decay = np.float32(0.02)
    bu, bi = np.zeros(len(W), np.float32), np.zeros(len(H), np.float32)
    gw, gh = np.ones(len(W), np.float32), np.ones(len(H), np.float32)
    for epoch in range(options.epochs):
        rate = np.float32(options.rate * options.fall**epoch)
        start = time.perf_counter()
        if options.method == "sgd":
            sgd(u, i, v - mean, W, H, rate, decay)
        elif options.method == "biases":
            sgd_biases(u, i, v, W, H, bu, bi, mean, rate, decay)
        else:
            adagrad(u, i, v - mean, W, H, gw, gh, np.float32(0.1), decay)
        seconds = time.perf_counter() - start
        left = v - mean - (bu[u] + bi[i] if options.method == "biases" else 0)
        rmse = np.sqrt(squared_error(u, i, left.astype(np.float32), W, H) / len(v))
        print(f"epoch {epoch + 1}: RMSE {rmse:.4f}, {len(v) / seconds / 1e6:.1f} M ratings/s")
    chosen = {"sgd": sgd, "biases": sgd_biases, "adagrad": adagrad}[options.method]
    print(chosen.explain())


if __name__ == "__main__":
    main()
