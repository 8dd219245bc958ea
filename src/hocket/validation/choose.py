"""Which measured runs to calibrate with: few that stand for the others.

Greedy maximin (Gonzalez 1985) finds runs that are far from each other; each then stands for the
runs nearest to it and gives way to the most central of these, until nothing changes (k-medoids,
Kaufman and Rousseeuw 1987). Features are logarithms of sizes and degrees, scaled to one: measured
times play no part. O(runs^2) time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.transformer import RECOMPUTES
from hocket.validation.rows import Measured

MAX_CALIBRATION_ROWS = 10
_MAX_SHARE = 0.5
"""Of a small table, at least half is kept to be scored."""
_MAX_ROUNDS = 50


def calibration_rows(rows: Sequence[Measured]) -> list[int]:
    """Positions of the runs to calibrate with, in the order in which they were taken."""
    count = min(MAX_CALIBRATION_ROWS, int(len(rows) * _MAX_SHARE))
    return central(features(rows), count) if count else []


def features(rows: Sequence[Measured]) -> FloatArray:
    """One line per run, each column from 0 to 1."""
    values = np.array([_features(row) for row in rows], dtype=np.float64)
    low, high = values.min(axis=0), values.max(axis=0)
    return np.asarray((values - low) / np.where(high > low, high - low, 1.0))


def central(points: FloatArray, count: int) -> list[int]:
    """Positions of ``count`` points that stand for the others; of equals the first."""
    distance = np.abs(points[:, None, :] - points[None, :, :]).sum(axis=2)
    taken = spread(points, count)
    for _ in range(_MAX_ROUNDS):
        nearest = np.argmin(distance[:, taken], axis=1)
        # Of runs with equal configurations, one that was taken still stands for itself.
        nearest[taken] = np.arange(count)
        groups = [np.flatnonzero(nearest == position) for position in range(count)]
        better = [
            int(group[np.argmin(distance[np.ix_(group, group)].sum(axis=1))]) for group in groups
        ]
        if better == taken:
            break
        taken = better
    return taken


def spread(points: FloatArray, count: int) -> list[int]:
    """Positions of ``count`` points that are far from each other; of equals the first."""
    middle = np.median(points, axis=0)
    taken = [int(np.argmin(np.abs(points - middle).sum(axis=1)))]
    distance = np.abs(points - points[taken[0]]).sum(axis=1)
    while len(taken) < count:
        distance[taken[-1]] = -1.0
        farthest = int(np.argmax(distance))
        taken.append(farthest)
        distance = np.minimum(distance, np.abs(points - points[farthest]).sum(axis=1))
    return taken


def _features(row: Measured) -> tuple[float, ...]:
    model, division = row.model, row.division
    sizes = (
        model.hidden, model.layers, model.head_width, division.tensor, division.pipeline,
        division.data, division.microbatch, max(division.num_microbatches, 1), division.chunks,
    )  # fmt: skip
    return (
        *(float(np.log(size)) for size in sizes),
        float(RECOMPUTES.index(division.recompute)),
        float(division.zero),
        float(row.software.gradient_bytes),
    )
