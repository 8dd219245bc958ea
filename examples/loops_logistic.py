"""Sparse logistic regression by SGD: updates of the weights are buffered, by permission.

python examples/loops_logistic.py a8a.libsvm.gz --epochs 5
"""

from __future__ import annotations

import argparse

import loops_data
import numpy as np

import hocket


@hocket.parallel_for(permit={"w": "buffer"}, max_delay=500)
def epoch(indptr, indices, x, y, w, rate, decay):
    for r in range(len(y)):
        s = 0.0
        for p in range(indptr[r], indptr[r + 1]):
            s += x[p] * w[indices[p]]
        g = y[r] - 1.0 / (1.0 + np.exp(-s))
        for p in range(indptr[r], indptr[r + 1]):
            w[indices[p]] += rate * (g * x[p] - decay * w[indices[p]])


@hocket.parallel_for
def log_loss(indptr, indices, x, y, w):
    total = 0.0
    for r in range(len(y)):
        s = 0.0
        for p in range(indptr[r], indptr[r + 1]):
            s += x[p] * w[indices[p]]
        total += np.log1p(np.exp(-s)) if y[r] > 0 else np.log1p(np.exp(s))
    return total / len(y)


def made_up(rows=4000, features=300, per_row=12, seed=0):
    rng = np.random.default_rng(seed)
    indptr = np.arange(0, rows * per_row + 1, per_row)
    indices = rng.integers(0, features, rows * per_row)
    truth = rng.normal(size=features)
    score = np.add.reduceat(truth[indices], indptr[:-1])
    y = (score + rng.logistic(size=rows) > 0).astype(np.float64)
    return indptr, indices, np.ones(len(indices)), y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libsvm", nargs="?", help="LIBSVM file; made up if left out")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    indptr, indices, x, y = loops_data.libsvm(options.libsvm) if options.libsvm else made_up()
    w = np.zeros(indices.max() + 1)
    for number in range(options.epochs):
        epoch(indptr, indices, x, y, w, 0.05, 1e-4)
        print(f"epoch {number + 1}: log loss {log_loss(indptr, indices, x, y, w):.4f}")
    print(epoch.explain())


if __name__ == "__main__":
    main()
