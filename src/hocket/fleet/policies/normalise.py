"""Reference throughputs of jobs in closed form (OSDI 2020, section 4)."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.cluster_snapshot import ClusterSnapshot


def proportional_steps_per_s(snapshot: ClusterSnapshot) -> FloatArray:
    """Throughput of a job that runs all the time, split over device types by their number."""
    devices = snapshot.num_devices.astype(float)
    return np.asarray(snapshot.steps_per_s @ (devices / max(devices.sum(), 1.0)))


def isolated_steps_per_s(snapshot: ClusterSnapshot) -> FloatArray:
    """Throughput of a job on an equal part of the cluster, one of ``num_jobs``."""
    shares = snapshot.num_devices[None, :] / (max(snapshot.num_jobs, 1) * snapshot.gang[:, None])
    shares = shares / np.maximum(1.0, shares.sum(axis=1, keepdims=True))
    return np.asarray((snapshot.steps_per_s * shares).sum(axis=1))


def per_unit(steps_per_s: FloatArray, unit: FloatArray) -> FloatArray:
    """Divide throughputs by a unit per job; 0 where the unit is 0."""
    return np.asarray(steps_per_s / np.where(unit > 0.0, unit, np.inf)[:, None])


def known_remaining_steps(snapshot: ClusterSnapshot, policy: str) -> FloatArray:
    """Remaining steps, at least 1e-9; raises `UsageError` if they are unknown."""
    unknown = np.flatnonzero(~np.isfinite(snapshot.remaining_steps))
    if len(unknown):
        raise UsageError(
            f"policy {policy!r} needs the remaining steps of job {snapshot.ids[unknown[0]]!r}",
            hint="give 'remaining_steps' for every job, or choose las",
        )
    # A job without remaining steps would have an infinite rate.
    return np.maximum(snapshot.remaining_steps, 1e-9)
