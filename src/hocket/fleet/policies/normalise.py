"""Throughputs that jobs are measured against (closed forms; section 1 of the OSDI 2020 paper)."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.market import Market


def proportional_steps_per_s(market: Market) -> FloatArray:
    """Running all the time, split over kinds by their number of devices."""
    devices = market.num_devices.astype(float)
    return np.asarray(market.steps_per_s @ (devices / max(devices.sum(), 1.0)))


def isolated_steps_per_s(market: Market) -> FloatArray:
    """Running on an equal part of the cluster, one of ``num_jobs``."""
    shares = market.num_devices[None, :] / (max(market.num_jobs, 1) * market.gang[:, None])
    shares = shares / np.maximum(1.0, shares.sum(axis=1, keepdims=True))
    return np.asarray((market.steps_per_s * shares).sum(axis=1))


def per_unit(steps_per_s: FloatArray, unit: FloatArray) -> FloatArray:
    """Throughputs in units of each job's own; 0 where a job has none."""
    return np.asarray(steps_per_s / np.where(unit > 0.0, unit, np.inf)[:, None])


def known_remaining_steps(market: Market, policy: str) -> FloatArray:
    """Remaining steps, at least a little; raises `UsageError` where they are not known."""
    unknown = np.flatnonzero(~np.isfinite(market.remaining_steps))
    if len(unknown):
        raise UsageError(
            f"policy {policy!r} needs the remaining steps of job {market.ids[unknown[0]]!r}",
            hint="give 'remaining_steps' for every job, or choose las",
        )
    return np.maximum(market.remaining_steps, 1e-9)
