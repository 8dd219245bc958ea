"""Estimate throughputs that nobody measured from a few measurements (Gavel's estimator).

Speeds of a job on other device types follow from jobs with similar names and gangs (`belief_from`).
The part of its speed that a job keeps beside each other job is an entry of a wide table with holes
(`complete`). Narayanan et al. (OSDI 2020, section 3.3) give a new job the row of its nearest
neighbour instead; here measured values stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import UsageError, did_you_mean
from hocket.fleet.throughputs.table import JobProfile, Throughputs

# The prior of a job before it is measured: jobs with similar names prefer similar devices. How much
# faster one device type is than another depends mostly on the model, then on sizes such as the
# batch, and names contain both: ``LM (batch size 20)`` and ``LM (batch size 40)`` differ in a
# number only. Rows of such a family, minus the mean of all jobs of their gang, are modelled as
# draws of a Gaussian process over the logarithms of the numbers and the gang (Rasmussen and
# Williams, 2006, section 2.2). A job without a family is expected to be like the mean. O(rows +
# family^3).

# Numbers in names of job types.
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_REACH = 2.0
"""Difference of logarithms over which similarity falls by e: a factor of 7.4 in a batch or
a gang."""
_NOISE = 0.03
"""Part of the variance of a row that like jobs do not share."""


class Expected(NamedTuple):
    """Normal distribution of the logarithms of throughputs, per device type."""

    mean: FloatArray
    covariance: FloatArray

    @property
    def deviation(self) -> FloatArray:
        """Standard deviation of each."""
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))


def expected_row(rows: FloatArray, profiles: Sequence[JobProfile], job: JobProfile) -> Expected:
    """Prior of another job from rows of logarithms, one per profile, up to a constant level.

    Without any rows, all device types are equal.
    """
    num_types = rows.shape[1]
    if not len(rows):
        return Expected(np.zeros(num_types), np.zeros((num_types, num_types)))
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
    near = _similarity(points, _point(job)[None, :])[:, 0]
    weight = np.linalg.solve(_similarity(points, points) + _NOISE * np.eye(len(family)), near)
    left = max(1.0 - float(near @ weight), 0.0) + _NOISE
    return Expected(mean + weight @ rest[family], min(left, 1.0) * covariance)


def family_of(profile: JobProfile) -> str:
    """The name of a job without its numbers."""
    return _NUMBER.sub("0", profile.job_type)


def _point(profile: JobProfile) -> FloatArray:
    """Logarithms of the numbers of a job."""
    numbers = [float(number) for number in _NUMBER.findall(profile.job_type)]
    return np.log(np.maximum([*numbers, profile.gang], 1e-3))


def _similarity(ones: FloatArray, others: FloatArray) -> FloatArray:
    """1 for jobs with equal numbers in their names, less the further they are apart."""
    distance = np.abs(ones[:, None, :] - others[None, :, :]).sum(axis=2)
    return np.asarray(np.exp(-distance / _REACH))


# A row of a narrow table from some of its entries: the conditional mean of a Gaussian.
#
# The row is taken for a draw of a normal distribution (`hocket.fleet.throughputs.unseen`) at a
# level of its own; what is known of it gives the mean and the deviation of the rest in closed form
# (kriging; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section A.2). For
# tables of a few columns, where a factor model has more factors than it can learn. O(columns^3).

_LEVEL_VARIANCE = 10.0
"""Added to all covariances: a step may be any amount of work, so how many a job does per second on
one device type says much about the other device types and little about the job."""
_NOISE_VARIANCE = 0.05
"""Added to the variance of each entry, so that few rows are not believed to the letter."""


def conditional_row(expected: Expected, known: FloatArray) -> Expected:
    """Posterior of the row given its known entries; NaN in ``known`` marks unknown ones."""
    num_columns = len(known)
    prior = expected.covariance + _LEVEL_VARIANCE + _NOISE_VARIANCE * np.eye(num_columns)
    given = np.flatnonzero(np.isfinite(known))
    weight = np.linalg.solve(prior[np.ix_(given, given)], prior[given, :])
    mean = expected.mean + (known[given] - expected.mean[given]) @ weight
    covariance = prior - prior[:, given] @ weight
    # Known entries are kept exactly.
    mean[given] = known[given]
    # Measured entries have no uncertainty left.
    covariance[given, :] = covariance[:, given] = 0.0
    return Expected(mean, covariance)


# Completion of a table with holes.
#
# Narayanan et al. (OSDI 2020, section 3.3) complete the table of shared over alone throughputs by
# matrix factorisation and match a new job to its nearest known one. Here logarithms are completed
# directly by a low-rank model with a ridge penalty, solved by alternating least squares (Koren,
# Bell and Volinsky, Computer 2009). O(iterations x entries x rank^2).

# Iterations of the least squares, and passes over means and factors.
_ITERATIONS = 30
_PASSES = 8


def complete(values: FloatArray, *, rank: int = 3, ridge: float = 0.1) -> FloatArray:
    """Fill the holes (NaN) of a table of positive numbers; measured entries stay as they are."""
    known = np.isfinite(values) & (values > 0.0)
    logs = np.log(np.where(known, values, 1.0))
    left, right = np.zeros((len(logs), 1)), np.zeros((logs.shape[1], 1))
    base = logs
    for _ in range(_PASSES):
        # With missing entries, the means of rows and columns and the factors depend on each other,
        # so they are computed in turn.
        centre, rows, columns = _centres(logs - left @ right.T, known)
        base = centre + rows[:, None] + columns[None, :]
        rest = np.where(known, logs - base, 0.0)
        left, right = _factors(rest, known, min(rank, *values.shape), ridge)
    return np.where(known, values, np.exp(base + left @ right.T))


def _centres(logs: FloatArray, known: BoolArray) -> tuple[float, FloatArray, FloatArray]:
    """Mean, and offsets of rows and columns, shrunk where few entries are known."""
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
    """Ridge regression of every row on the factor, over its known entries."""
    weight = known.astype(float)
    gram = np.einsum("ij,jr,js->irs", weight, factor, factor) + ridge * np.eye(factor.shape[1])
    right_side = (weight * rest) @ factor
    return np.asarray(np.linalg.solve(gram, right_side[:, :, None])[:, :, 0])


# What is believed of a job's throughputs, and how much more may be hoped for.
#
# A policy that trusts estimates never tries a device type whose estimate is too low, and never
# learns that. Here each device type counts as fast as it may be: the mean plus some deviations of
# its logarithm (optimism; Auer, Cesa-Bianchi and Fischer, Machine Learning 2002). Either that is
# true, or the job is put there and is measured: r measurements leave at most the r-th part of the
# variance of one, so a hope that is false is given up after a few rounds, and a device type that
# was measured counts as fast as measured. A measurement also updates the other device types, by
# their covariance (a Kalman filter whose state does not move). O(types^2) per measurement.

_MOST = 700.0
"""Logarithms above this would overflow."""
_MEASURED_VARIANCE = 0.05**2
"""Variance of the logarithm of one measurement: rounds of one job, and jobs of one type, differ by
about 5 %.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Belief:
    """Estimated throughputs of one job type."""

    logs: Expected
    can_run: BoolArray
    """Device types on which it can run."""

    def after(self, device_type: int, steps_per_s: float) -> Belief:
        """Update by a measurement of steps per second on a device type (Kalman filter)."""
        if not 0.0 < steps_per_s < np.inf:
            raise UsageError(f"{steps_per_s!r} is no measured number of steps per second")
        mean, covariance = self.logs
        column = covariance[:, device_type]
        gain = column / (column[device_type] + _MEASURED_VARIANCE)
        logs = Expected(
            mean + gain * (np.log(steps_per_s) - mean[device_type]),
            covariance - np.outer(gain, column),
        )
        return Belief(logs=logs, can_run=self.can_run)

    def steps_per_s(self, boldness: float = 0.0) -> FloatArray:
        """Mean plus ``boldness`` standard deviations of the logarithm, on each device type."""
        if not 0.0 <= boldness < np.inf:
            raise UsageError(f"{boldness!r} is no boldness", hint="choose 0 to 3 or so")
        hoped = np.exp(np.minimum(self.logs.mean + boldness * self.logs.deviation, _MOST))
        return np.where(self.can_run, hoped, 0.0)


def belief_from(table: Throughputs, job: JobProfile, alone: Mapping[str, float]) -> Belief:
    """Estimate a job that a table does not have from measured speeds on some device types.

    A speed of 0 means that the job cannot run there. Raises `UsageError` for device types that the
    table does not have, for invalid speeds, and if no speed is known.
    """
    for device_type, speed in alone.items():
        if device_type not in table.device_types:
            hint = did_you_mean(device_type, table.device_types)
            raise UsageError(f"the table has no devices of type {device_type!r}", hint=hint)
        if not 0.0 <= speed < np.inf:
            raise UsageError(f"{speed!r} is no number of steps per second")
    measured = np.array([alone.get(device_type, np.nan) for device_type in table.device_types])
    if not (measured > 0.0).any():
        raise UsageError(
            f"nothing is known of {job.job_type!r}", hint="measure it on one device type"
        )
    full = np.flatnonzero((table.alone > 0.0).all(axis=1))
    expected = expected_row(np.log(table.alone[full]), [table.profiles[at] for at in full], job)
    known = np.log(np.where(measured > 0.0, measured, np.nan))
    return Belief(logs=conditional_row(expected, known), can_run=measured != 0.0)
