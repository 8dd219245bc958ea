"""Throughputs that nobody measured, from those of similar jobs.

Narayanan et al. (OSDI 2020, section 3.3) complete the table of shared over alone throughputs by
matrix factorisation and match a new job to its nearest known one. Here logarithms are completed
directly by a low-rank model with a ridge penalty, solved by alternating least squares (Koren, Bell
and Volinsky, Computer 2009), and every estimate says how uncertain it is. O(iterations x entries x
rank^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray

_ITERATIONS = 30
_PASSES = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Completed:
    """A table without holes."""

    values: FloatArray
    """Measured entries as they were, estimates elsewhere."""
    log_deviation: FloatArray
    """Standard deviation of the logarithm of each estimate; 0 where it was measured."""


def complete(values: FloatArray, *, rank: int = 3, ridge: float = 0.1) -> Completed:
    """Fill the holes (NaN) of a table of positive numbers."""
    known = np.isfinite(values) & (values > 0.0)
    logs = np.log(np.where(known, values, 1.0))
    left, right = np.zeros((len(logs), 1)), np.zeros((logs.shape[1], 1))
    base = logs
    for _ in range(_PASSES):
        # With holes, the means of rows and columns depend on the rest and the rest on them.
        centre, rows, columns = _centres(logs - left @ right.T, known)
        base = centre + rows[:, None] + columns[None, :]
        rest = np.where(known, logs - base, 0.0)
        left, right = _factors(rest, known, min(rank, *values.shape), ridge)
    estimate = base + left @ right.T
    deviation = _deviation(logs - estimate, known, left, right, ridge)
    return Completed(
        values=np.where(known, values, np.exp(estimate)),
        log_deviation=np.where(known, 0.0, deviation),
    )


def _centres(logs: FloatArray, known: BoolArray) -> tuple[float, FloatArray, FloatArray]:
    """Mean, and what rows and columns add to it, shrunk where little is known of them."""
    centre = float(logs[known].mean()) if known.any() else 0.0
    rows, columns = np.zeros(logs.shape[0]), np.zeros(logs.shape[1])
    for _ in range(_ITERATIONS):
        rest = np.where(known, logs - centre - columns[None, :], 0.0)
        rows = rest.sum(axis=1) / (known.sum(axis=1) + 0.1)
        rest = np.where(known, logs - centre - rows[:, None], 0.0)
        columns = rest.sum(axis=0) / (known.sum(axis=0) + 0.1)
    return centre, rows, columns


def _factors(
    rest: FloatArray, known: BoolArray, rank: int, ridge: float
) -> tuple[FloatArray, FloatArray]:
    _, _, transposed = np.linalg.svd(rest, full_matrices=False)
    right = np.ascontiguousarray(transposed[:rank].T)
    left = np.zeros((rest.shape[0], rank))
    for _ in range(_ITERATIONS):
        left = _solve(rest, known, right, ridge)
        right = _solve(rest.T, known.T, left, ridge)
    return left, right


def _solve(rest: FloatArray, known: BoolArray, factor: FloatArray, ridge: float) -> FloatArray:
    """The ridge regression of every row on the factor, over its known entries."""
    weight = known.astype(float)
    gram = np.einsum("ij,jr,js->irs", weight, factor, factor) + ridge * np.eye(factor.shape[1])
    right_side = (weight * rest) @ factor
    return np.asarray(np.linalg.solve(gram, right_side[:, :, None])[:, :, 0])


def _deviation(
    residual: FloatArray,
    known: BoolArray,
    left: FloatArray,
    right: FloatArray,
    ridge: float,
) -> FloatArray:
    """Noise of the known entries, widened where a row says little in the direction of a column."""
    used = left.shape[1] * sum(left.shape[:1] + right.shape[:1])
    freedom = max(int(known.sum()) - used, 1)
    noise = float(np.sqrt((residual[known] ** 2).sum() / freedom)) if known.any() else 1.0
    weight = known.astype(float)
    gram = np.einsum("ij,jr,js->irs", weight, right, right) + ridge * np.eye(right.shape[1])
    spread = np.einsum("jr,irs,js->ij", right, np.linalg.inv(gram), right)
    few = 1.0 / (1.0 + known.sum(axis=1))
    return np.asarray(noise * np.sqrt(1.0 + spread + few[:, None]))
