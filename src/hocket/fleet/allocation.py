"""Result of a policy: the share of time that each job gets on each device type."""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.base.arrays import FloatArray, LongArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Warm:
    """Start values for the next solve."""

    prices: FloatArray
    """``[question, pool]``: device prices to start the solve with."""
    level: float
    columns: LongArray | None = None
    """``[pair, 3]``: device type and the profiles that shared it, where jobs may share."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedTime:
    """Time that two jobs spend on the same devices, summed by pair of profiles; the rounds decide
    which jobs of these profiles share.
    """

    profile_a: LongArray
    profile_b: LongArray
    device_type: LongArray
    amount: FloatArray
    """Summed shares of all pairs of these two profiles on this device type."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairedTime:
    """The same time as `SharedTime`, per job: one row for each job, profile of its partner, and
    device type.
    """

    job: LongArray
    profile: LongArray
    device_type: LongArray
    amount: FloatArray
    """Part of the job's time."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Allocation:
    """Shares of time, with objective and proven bound."""

    policy: str
    shares: FloatArray
    """``[job, type]``: part of its time that a job has devices of one type alone."""
    shared: SharedTime | None = None
    """Time that devices are shared by two jobs, by profile."""
    paired: PairedTime | None = None
    """The same time by job."""
    objective: float
    """Objective of the policy, in its own unit."""
    bound: float
    """Bound that no allocation can exceed (or undercut)."""
    notes: dict[str, str] = field(default_factory=dict)
    """Remarks of the policy, such as the deadlines that it had to drop."""
    warm: Warm | None = None
    """A good start for the next moment's solve."""

    @property
    def gap(self) -> float:
        """Largest possible distance from the optimum, relative to the bound."""
        if self.objective == self.bound:
            # Also if no job limits it, where both are infinite.
            return 0.0
        scale = max(abs(self.bound), 1e-300)
        return abs(self.bound - self.objective) / scale
