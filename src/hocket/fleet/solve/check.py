"""Checks of an allocation: nobody has more time than there is, nor any device."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import CheckError
from hocket.fleet.allocation import Allocation
from hocket.fleet.cluster_snapshot import ClusterSnapshot

TOLERANCE = 1e-9


def verify_allocation(snapshot: ClusterSnapshot, allocation: Allocation) -> None:
    """Raise `CheckError` that lists violated limits of an allocation."""
    found = violations(snapshot, allocation)
    if found:
        raise CheckError("; ".join(found[:5]), where=f"allocation by {allocation.policy}")


def violations(snapshot: ClusterSnapshot, allocation: Allocation) -> list[str]:
    """List the violated limits of an allocation; empty for a legal one."""
    shares = allocation.shares
    if shares.shape != snapshot.steps_per_s.shape or not np.all(np.isfinite(shares)):
        return [f"shares have the shape {shares.shape} or are not numbers"]
    found = [
        f"job {snapshot.ids[job]!r} has a share of {shares[job, device_type]:g} "
        f"on {snapshot.device_types[device_type]!r}"
        for job, device_type in np.argwhere(shares < -TOLERANCE)
    ]
    found += [
        f"job {snapshot.ids[job]!r} has time on {snapshot.device_types[at]!r}, where it cannot run"
        for job, at in np.argwhere((shares > TOLERANCE) & (snapshot.usable_steps_per_s <= 0.0))
    ]
    return found + _too_much_time(snapshot, allocation) + _too_many_devices(snapshot, allocation)


def throughputs(snapshot: ClusterSnapshot, allocation: Allocation) -> FloatArray:
    """Steps per second of each job."""
    alone = (snapshot.steps_per_s * allocation.shares).sum(axis=1)
    paired, pairs = allocation.paired, snapshot.pairs
    if paired is None or pairs is None:
        return np.asarray(alone)
    beside = pairs.steps_per_s[pairs.profile_of[paired.job], paired.profile, paired.device_type]
    return np.asarray(alone + np.bincount(paired.job, paired.amount * beside, snapshot.num_jobs))


def _too_much_time(snapshot: ClusterSnapshot, allocation: Allocation) -> list[str]:
    times = allocation.shares.sum(axis=1)
    if allocation.paired is not None:
        times = times + np.bincount(
            allocation.paired.job, allocation.paired.amount, snapshot.num_jobs
        )
    found = [
        f"job {snapshot.ids[job]!r} has {times[job]:.12g} of its time"
        for job in np.flatnonzero(times > 1.0 + TOLERANCE)
    ]
    return found + _parted(snapshot, allocation)


def _parted(snapshot: ClusterSnapshot, allocation: Allocation) -> list[str]:
    """Differences between the pair time stated by job and by profile."""
    shared, paired, pairs = allocation.shared, allocation.paired, snapshot.pairs
    if (shared is None) != (paired is None):
        return ["time in pairs is stated for jobs or for profiles only"]
    if shared is None or paired is None or pairs is None:
        return []
    together = np.zeros((2, *pairs.steps_per_s.shape))
    both = ((shared.profile_a, shared.profile_b), (shared.profile_b, shared.profile_a))
    for one, other in both:
        np.add.at(together[0], (one, other, shared.device_type), shared.amount)
    profile = pairs.profile_of[paired.job]
    np.add.at(together[1], (profile, paired.profile, paired.device_type), paired.amount)
    is_off = np.abs(together[0] - together[1]) > TOLERANCE * (1.0 + together[0])
    return [
        f"jobs of profile {one} have another time beside {other} than is stated for profiles"
        for one, other, _ in np.argwhere(is_off)
    ]


def _too_many_devices(snapshot: ClusterSnapshot, allocation: Allocation) -> list[str]:
    used = snapshot.gang @ allocation.shares
    shared, pairs = allocation.shared, snapshot.pairs
    if shared is not None and pairs is not None:
        gang_of = np.zeros(len(pairs.steps_per_s))
        gang_of[pairs.profile_of] = snapshot.gang
        devices = shared.amount * gang_of[shared.profile_a]
        used += np.bincount(shared.device_type, devices, snapshot.num_types)
    # The tolerance is relative for large pools and absolute for pools without devices.
    limit = snapshot.num_devices * (1.0 + TOLERANCE) + TOLERANCE
    return [
        f"{used[at]:.12g} devices of {snapshot.device_types[at]!r} are used, there are "
        f"{snapshot.num_devices[at]}"
        for at in np.flatnonzero(used > limit)
    ]
