"""A row of a narrow table from some of its entries: the conditional mean of a Gaussian.

The row is taken for a draw of a normal distribution (`hocket.contrib.unseen.similar`) at a level
of its own; what is known of it gives the mean and the deviation of the rest in closed form
(kriging; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section A.2). For
tables of a few columns, where a factor model has more factors than it can learn. O(columns^3).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.contrib.unseen.similar import Expected

_LEVEL_VARIANCE = 10.0
"""Added to all covariances: a step may be any amount of work, so how many a job does per second on
one kind says much about the other kinds and little about the job."""
_NOISE_VARIANCE = 0.05
"""Added to the variance of each entry, so that few rows are not believed to the letter."""


def conditional_row(expected: Expected, known: FloatArray) -> Expected:
    """The row and what is not sure of it; NaN in ``known`` is what is asked for."""
    num_columns = len(known)
    prior = expected.covariance + _LEVEL_VARIANCE + _NOISE_VARIANCE * np.eye(num_columns)
    given = np.flatnonzero(np.isfinite(known))
    weight = np.linalg.solve(prior[np.ix_(given, given)], prior[given, :])
    mean = expected.mean + (known[given] - expected.mean[given]) @ weight
    covariance = prior - prior[:, given] @ weight
    # What is known is known to the last bit.
    mean[given] = known[given]
    covariance[given, :] = covariance[:, given] = 0.0
    return Expected(mean, covariance)
