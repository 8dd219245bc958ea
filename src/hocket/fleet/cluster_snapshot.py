"""Input of an allocation policy: device types and jobs, as arrays.

Rows are jobs, columns are device types. A share is the part of its time that a job spends on a
device type; shares of a job sum to at most one; a job that runs holds as many devices as its gang.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs:
    """Throughputs of two jobs of equal gang on the same devices, by profile.

    Jobs of one profile have the same gang and the same throughputs, alone and beside others.
    """

    profile_of: LongArray
    """The profile of each job."""
    steps_per_s: FloatArray
    """``[a, b, type]``: what a job of profile a does beside one of profile b; 0 where they may not
    share a device of that type."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterSnapshot:
    """Devices and jobs at one moment."""

    device_types: tuple[str, ...]
    num_devices: LongArray
    """Number of devices of each type."""
    price_per_hour: FloatArray
    """Price of one device of each type."""
    ids: tuple[str, ...]
    """Names of the jobs."""
    steps_per_s: FloatArray
    """``[job, type]``: steps per second of the whole gang; 0 if the job may not or cannot run
    there.
    """
    gang: LongArray
    """Number of devices that each job holds while it runs."""
    weight: FloatArray
    """A job of weight 2 gets twice the share."""
    remaining_steps: FloatArray
    """Infinite if unknown."""
    elapsed_s: FloatArray
    """Seconds since submission."""
    deadline_s: FloatArray
    """Seconds from now; infinite for none."""
    isolated_s: FloatArray
    """Time that the work done so far would have taken alone on an equal part of the cluster."""
    arrival: LongArray
    """Rank of arrival: 0 came first."""
    team_of: LongArray
    """The team of each job; all 0 where there are no teams."""
    teams: tuple[str, ...] = ("",)
    team_weight: FloatArray
    """One per team."""
    pairs: Pairs | None = None
    """Present where jobs may share devices."""
    last_shares: FloatArray | None = None
    """Shares of the previous allocation, for policies that leave running jobs where they are."""
    is_overdue: BoolArray | None = None
    """Jobs that have run much longer than they claimed to need. Their remaining steps are a guess,
    so they get no precedence for needing little. None if there are no such jobs.
    """

    @property
    def num_jobs(self) -> int:
        """Number of jobs."""
        return len(self.ids)

    @property
    def num_types(self) -> int:
        """Number of device types."""
        return len(self.device_types)

    @property
    def keeps_word(self) -> BoolArray:
        """``[job]``: False once a job has run much longer than it claimed to need."""
        return np.ones(self.num_jobs, dtype=bool) if self.is_overdue is None else ~self.is_overdue

    @property
    def usable_steps_per_s(self) -> FloatArray:
        """Throughputs; 0 also where a device type has fewer devices than the gang needs."""
        has_capacity = self.gang[:, None] <= self.num_devices[None, :]
        return np.where(has_capacity, self.steps_per_s, 0.0)
