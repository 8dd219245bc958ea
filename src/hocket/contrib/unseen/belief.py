"""What is believed of a job's throughputs, and how much more may be hoped for.

A policy that trusts estimates never tries a kind whose estimate is too low, and never learns that.
Here each kind is taken for as fast as it may be: the mean plus some deviations of its logarithm
(optimism; Auer, Cesa-Bianchi and Fischer, Machine Learning 2002). Either the hope is true, or the
job is put there and is measured: r measurements leave at most the r-th part of the variance of one,
so a hope that is false is given up after a few rounds, and a kind that was measured is taken for
what it does. A measurement also says something of the other kinds, by their covariance (a Kalman
filter whose state does not move). O(kinds^2) per measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import UsageError, did_you_mean
from hocket.contrib.unseen.conditional import conditional_row
from hocket.contrib.unseen.similar import Expected, expected_row
from hocket.fleet.throughputs.table import JobProfile, Throughputs

_MOST = 700.0
"""Logarithms above this are no numbers any more."""
_MEASURED_VARIANCE = 0.05**2
"""Of the logarithm of one measurement: rounds of one job, and jobs of one kind, differ by 5 %."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Belief:
    """Throughputs of one kind of job."""

    logs: Expected
    can_run: BoolArray
    """Kinds on which it can run."""

    def after(self, kind: int, steps_per_s: float) -> Belief:
        """What is believed once a job did so many steps per second on a kind."""
        if not 0.0 < steps_per_s < np.inf:
            raise UsageError(f"{steps_per_s!r} is no measured number of steps per second")
        mean, covariance = self.logs
        column = covariance[:, kind]
        gain = column / (column[kind] + _MEASURED_VARIANCE)
        logs = Expected(
            mean + gain * (np.log(steps_per_s) - mean[kind]), covariance - np.outer(gain, column)
        )
        return Belief(logs=logs, can_run=self.can_run)

    def steps_per_s(self, boldness: float = 0.0) -> FloatArray:
        """As fast as it may be on each kind by ``boldness`` deviations; 0: what is most likely."""
        if not 0.0 <= boldness < np.inf:
            raise UsageError(f"{boldness!r} is no boldness", hint="choose 0 to 3 or so")
        hoped = np.exp(np.minimum(self.logs.mean + boldness * self.logs.deviation, _MOST))
        return np.where(self.can_run, hoped, 0.0)


def check_kind(table: Throughputs, kind: str) -> None:
    """Raise `UsageError` for a kind of device that a table does not have."""
    if kind not in table.kinds:
        hint = did_you_mean(kind, table.kinds)
        raise UsageError(f"the table has no devices of kind {kind!r}", hint=hint)


def check_speed(steps_per_s: float) -> None:
    """Raise `UsageError` for what is no number of steps per second; 0 is one."""
    if not 0.0 <= steps_per_s < np.inf:
        raise UsageError(f"{steps_per_s!r} is no number of steps per second")


def belief_from(table: Throughputs, job: JobProfile, alone: Mapping[str, float]) -> Belief:
    """What a table and exact speeds on some kinds say of a job that the table does not have.

    A kind with 0 stays 0: the job cannot run there. Raises `UsageError` for kinds that the table
    does not have, for what is no speed, and where not even one kind is known.
    """
    for kind, speed in alone.items():
        check_kind(table, kind)
        check_speed(speed)
    measured = np.array([alone.get(kind, np.nan) for kind in table.kinds])
    if not (measured > 0.0).any():
        raise UsageError(
            f"nothing is known of {job.job_type!r}", hint="measure it on one kind of device"
        )
    full = np.flatnonzero((table.alone > 0.0).all(axis=1))
    expected = expected_row(np.log(table.alone[full]), [table.profiles[at] for at in full], job)
    known = np.log(np.where(measured > 0.0, measured, np.nan))
    return Belief(logs=conditional_row(expected, known), can_run=measured != 0.0)
