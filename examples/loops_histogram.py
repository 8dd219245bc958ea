"""Gradient-boosted stumps: the histograms of gradients, which take the time, on all cores.

python examples/loops_histogram.py a8a.libsvm.gz --rounds 10
"""

from __future__ import annotations

import argparse

import loops_data
import numpy as np

import hocket


@hocket.parallel_for
def histograms(bins, gradient, sums, counts):
    for n in range(bins.shape[0]):
        for f in range(bins.shape[1]):
            sums[f, bins[n, f]] += gradient[n]
            counts[f, bins[n, f]] += 1


def dense(indptr, indices, x, num_bins=16):
    """Each feature cut into bins of equal ranges."""
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    matrix = np.zeros((len(indptr) - 1, indices.max() + 1))
    matrix[rows, indices] = x
    low, high = matrix.min(axis=0), matrix.max(axis=0)
    scaled = (matrix - low) / np.where(high > low, high - low, 1)
    return np.minimum((scaled * num_bins).astype(np.int64), num_bins - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libsvm", nargs="?", help="LIBSVM file; made up if left out")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if options.libsvm:
        indptr, indices, x, y = loops_data.libsvm(options.libsvm)
        bins = dense(indptr, indices, x)
    else:
        rng = np.random.default_rng(0)
        bins = rng.integers(0, 16, (5000, 30))
        y = ((bins[:, 3] > 8) ^ (bins[:, 7] > 4)).astype(np.float64)
    score = np.zeros(len(y))
    for number in range(options.rounds):
        chance = 1 / (1 + np.exp(-score))
        shape = bins.shape[1], int(bins.max()) + 1
        sums, counts = np.zeros(shape), np.zeros(shape, np.int64)
        histograms(bins, y - chance, sums, counts)
        left, size = np.cumsum(sums, axis=1), np.cumsum(counts, axis=1)
        whole, everyone = left[:, -1:], size[:, -1:]
        gain = left**2 / np.maximum(size, 1) + (whole - left) ** 2 / np.maximum(everyone - size, 1)
        feature, cut = np.unravel_index(np.argmax(gain), gain.shape)
        below = bins[:, feature] <= cut
        for side in (below, ~below):
            if side.any():
                score[side] += 2.0 * (y - chance)[side].mean()
        loss = -np.mean(np.log(np.where(y > 0, chance, 1 - chance) + 1e-12))
        print(f"round {number + 1}: feature {feature} at {cut}, log loss before {loss:.4f}")
    print(histograms.explain())


if __name__ == "__main__":
    main()
