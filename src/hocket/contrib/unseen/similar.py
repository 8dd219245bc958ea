"""What is expected of a job before it is measured: jobs of like names prefer like devices.

How much faster one kind is than another depends on the model most, then on sizes such as that of
the batch, and both stand in names: ``LM (batch size 20)`` and ``LM (batch size 40)`` differ in a
number only. Rows of such a family, less the mean of all jobs of their gang, are taken for draws of
a Gaussian process over the logarithms of the numbers and the gang (Rasmussen and Williams, 2006,
section 2.2); a job of no family is expected to be like the mean. O(rows + family^3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.throughputs.table import JobProfile

_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_REACH = 2.0
"""Difference of logarithms over which likeness falls by e: a factor of 7.4 in a batch or a gang."""
_NOISE = 0.03
"""Part of the variance of a row that like jobs do not share."""


class Expected(NamedTuple):
    """Logarithms of the throughputs of a job on each kind, taken for normal."""

    mean: FloatArray
    covariance: FloatArray

    @property
    def deviation(self) -> FloatArray:
        """Standard deviation of each."""
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))


def expected_row(rows: FloatArray, profiles: Sequence[JobProfile], job: JobProfile) -> Expected:
    """What rows of logarithms, one for each profile, say of another job, up to a level of its own.

    Without any, all kinds are alike.
    """
    num_kinds = rows.shape[1]
    if not len(rows):
        return Expected(np.zeros(num_kinds), np.zeros((num_kinds, num_kinds)))
    shapes = rows - rows.mean(axis=1, keepdims=True)
    gangs = np.array([profile.gang for profile in profiles])
    rest = shapes.copy()
    for gang in np.unique(gangs):
        rest[gangs == gang] -= shapes[gangs == gang].mean(axis=0)
    mean = shapes[gangs == job.gang].mean(axis=0) if job.gang in gangs else shapes.mean(axis=0)
    covariance = rest.T @ rest / max(len(rest) - 1, 1)
    family = [at for at, profile in enumerate(profiles) if family_of(profile) == family_of(job)]
    if not family:
        return Expected(mean, covariance)
    points = np.array([_point(profiles[at]) for at in family])
    near = _likeness(points, _point(job)[None, :])[:, 0]
    weight = np.linalg.solve(_likeness(points, points) + _NOISE * np.eye(len(family)), near)
    left = max(1.0 - float(near @ weight), 0.0) + _NOISE
    return Expected(mean + weight @ rest[family], min(left, 1.0) * covariance)


def family_of(profile: JobProfile) -> str:
    """The name of a job without its numbers."""
    return _NUMBER.sub("0", profile.job_type)


def _point(profile: JobProfile) -> FloatArray:
    """Logarithms of the numbers of a job."""
    numbers = [float(number) for number in _NUMBER.findall(profile.job_type)]
    return np.log(np.maximum([*numbers, profile.gang], 1e-3))


def _likeness(ones: FloatArray, others: FloatArray) -> FloatArray:
    """1 for jobs whose numbers are equal, less the further they are apart."""
    distance = np.abs(ones[:, None, :] - others[None, :, :]).sum(axis=2)
    return np.asarray(np.exp(-distance / _REACH))
