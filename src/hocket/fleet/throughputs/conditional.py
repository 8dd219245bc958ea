"""A row of a narrow table from some of its entries: the conditional mean of a Gaussian.

Rows of logarithms are taken for draws of one normal distribution; what is known of a new row gives
the mean and the deviation of the rest in closed form (kriging; Rasmussen and Williams, Gaussian
Processes for Machine Learning, 2006, section A.2). For tables of a few columns and many full rows,
where a factor model has more factors than it can learn. O(rows x columns^2 + columns^3).
"""

from __future__ import annotations

import numpy as np

from hocket.arrays import FloatArray

_LEVEL_VARIANCE = 10.0
"""Added to all covariances: a step may be any amount of work, so how many a job does per second on
one kind says much about the other kinds and little about the job."""
_NOISE_VARIANCE = 0.1
"""Added to the variance of each entry, so that few rows are not believed to the letter."""


def conditional_row(rows: FloatArray, known: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The new row and the deviation of its entries; NaN in ``known`` is what is asked for.

    ``rows`` are logarithms of full rows; without any, all columns are taken to be alike.
    """
    num_columns = len(known)
    mean = rows.mean(axis=0) if len(rows) else np.zeros(num_columns)
    spread = np.cov(rows, rowvar=False).reshape(num_columns, -1) if len(rows) > 1 else 0.0
    covariance = spread + _LEVEL_VARIANCE + _NOISE_VARIANCE * np.eye(num_columns)
    given, asked = np.flatnonzero(np.isfinite(known)), np.flatnonzero(np.isnan(known))
    cross = covariance[np.ix_(given, asked)]
    weight = np.linalg.solve(covariance[np.ix_(given, given)], cross)
    row, deviation = known.copy(), np.zeros(num_columns)
    row[asked] = mean[asked] + (known[given] - mean[given]) @ weight
    variance = np.diag(covariance)[asked] - (cross * weight).sum(axis=0)
    deviation[asked] = np.sqrt(np.maximum(variance, 0.0))
    return row, deviation
