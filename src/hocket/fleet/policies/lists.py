"""First come, first served, and shortest job first: jobs in order, each on the best free devices.

Each job in turn takes the fastest device type with enough free devices. A job that finds none
closes the device types on which it could run to all jobs behind it, so that nobody overtakes. If
jobs may share devices, waiting jobs then join running ones of equal gang if the sum of their
relative throughputs exceeds 1.5 (the rule of the baselines of OSDI 2020). O(running jobs x types),
plus pairs.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import shake_128

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.allocation import Allocation, PairedTime, SharedTime, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.normalise import known_remaining_steps, per_unit

# Jobs stay where the last allocation put them, as long as there are devices.


def staying_on(snapshot: ClusterSnapshot) -> LongArray:
    """The device type on which each job had all its time and stays; -1 for none.

    If there are fewer devices now, the earliest jobs stay.
    """
    stays_on = np.full(snapshot.num_jobs, -1)
    if snapshot.last_shares is None:
        return stays_on
    had_all = (snapshot.last_shares >= 1.0) & (snapshot.usable_steps_per_s > 0.0)
    free = snapshot.num_devices.astype(np.int64)
    by_arrival = np.argsort(snapshot.arrival, kind="stable")
    for job in by_arrival[had_all[by_arrival].any(axis=1)].tolist():
        device_type = int(np.argmax(had_all[job]))
        if snapshot.gang[job] <= free[device_type]:
            free[device_type] -= snapshot.gang[job]
            stays_on[job] = device_type
    return stays_on


# Two jobs share a device only if their relative throughputs sum to more than this.
_WORTH_SHARING = 1.5


def fifo(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Jobs in order of arrival, each on its fastest free device type; running jobs stay."""
    order, preference = _stay(snapshot, snapshot.usable_steps_per_s)
    return _allocate_in_order("fifo", snapshot, order, preference)


def fifo_strict(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """The shares of ``fifo``; rounds then let nobody overtake, while ``fifo`` backfills."""
    return replace(fifo(snapshot, warm), policy="fifo-strict")


def fifo_as_gavel(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Gavel's FIFO: a job that fits on no device type with enough free devices is skipped."""
    order = np.argsort(snapshot.arrival, kind="stable")
    return _allocate_in_order("fifo", snapshot, order, snapshot.usable_steps_per_s, is_strict=False)


def fifo_agnostic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Jobs in order of arrival, each on any free device type; running jobs stay."""
    order, preference = _stay(snapshot, _drawn(snapshot.ids, snapshot.num_types))
    return _allocate_in_order(
        "fifo-agnostic", snapshot, order, np.where(snapshot.steps_per_s > 0.0, preference, 0.0)
    )


def _stay(snapshot: ClusterSnapshot, preference: FloatArray) -> tuple[LongArray, FloatArray]:
    """Order of jobs (running ones first, then by arrival) and their preference for each device
    type."""
    stays_on = staying_on(snapshot)
    stay = np.flatnonzero(stays_on >= 0)
    preference = preference.copy()
    preference[stay, stays_on[stay]] = np.inf
    return np.lexsort((snapshot.arrival, stays_on < 0)), preference


def shortest_job_first(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Shortest remaining time on the fastest device type first; overdue jobs come last."""
    remaining = known_remaining_steps(snapshot, "shortest-job-first")
    fastest = snapshot.usable_steps_per_s.max(axis=1, initial=0.0)
    length_s = remaining / np.where(fastest > 0.0, fastest, 1e-300)
    order = np.lexsort((snapshot.arrival, length_s, ~snapshot.keeps_word))
    return _allocate_in_order("shortest-job-first", snapshot, order, snapshot.usable_steps_per_s)


def _drawn(names: tuple[str, ...], num_types: int) -> FloatArray:
    """``[job, type]``: a random preference above 0 that depends on the job name alone."""
    drawn = b"".join(_draw(name, num_types) for name in names)
    places = np.frombuffer(drawn, dtype=np.uint32).reshape(len(names), num_types)
    return places.astype(np.float64) + 1.0


def _draw(name: str, num_types: int) -> bytes:
    return shake_128(name.encode(errors="surrogatepass")).digest(4 * num_types)


def _allocate_in_order(
    name: str,
    snapshot: ClusterSnapshot,
    order: LongArray,
    speed: FloatArray,
    *,
    is_strict: bool = True,
) -> Allocation:
    order = order[snapshot.usable_steps_per_s[order].any(axis=1)]
    shares = np.zeros(snapshot.steps_per_s.shape)
    type_of_job = _place(snapshot, order, speed, is_strict)
    running = order[type_of_job[order] >= 0]
    shares[running, type_of_job[running]] = 1.0
    shared = paired = None
    if snapshot.pairs is not None:
        couples, device_type = _join(snapshot, order, type_of_job, shares)
        shared, paired = time_of_couples(snapshot, couples, device_type, np.ones(len(device_type)))
    fastest = snapshot.usable_steps_per_s.max(axis=1, initial=0.0)
    served = (per_unit(snapshot.usable_steps_per_s, fastest) * shares).sum(axis=1)
    objective = float((served[order] * np.arange(len(order), 0, -1)).sum())
    notes = {
        "rule": "jobs in order; there is no better answer to the rule",
        "run": str(len(running)),
    }
    return Allocation(
        policy=name,
        shares=shares,
        shared=shared,
        paired=paired,
        objective=objective,
        bound=objective,
        notes=notes,
    )


def _place(
    snapshot: ClusterSnapshot, order: LongArray, speed: FloatArray, is_strict: bool
) -> LongArray:
    """``[job]``: the device type on which it runs, -1 for none."""
    free = snapshot.num_devices.astype(np.int64)
    type_of_job = np.full(snapshot.num_jobs, -1)
    can_run = (speed > 0.0) & (snapshot.usable_steps_per_s > 0.0)
    for job in order:
        gang = snapshot.gang[job]
        has_capacity = free >= gang
        fits = can_run[job] & has_capacity
        if not fits.any():
            # With strict order, no later job may overtake on a device type that this job waits for.
            if is_strict:
                free[can_run[job]] = 0
            if not (free if is_strict else has_capacity).any():
                break
            continue
        # Of equally fast types, the one with the most free devices.
        best = fits & (speed[job] == speed[job][fits].max())
        device_type = int(np.argmax(np.where(best, free, -1)))
        type_of_job[job] = device_type
        free[device_type] -= gang
    return type_of_job


def _join(
    snapshot: ClusterSnapshot, order: LongArray, type_of_job: LongArray, shares: FloatArray
) -> tuple[LongArray, LongArray]:
    """Let waiting jobs join the running job with the largest summed throughput; returns the couples
    of jobs and their device types."""
    assert snapshot.pairs is not None
    profile, beside = snapshot.pairs.profile_of, snapshot.pairs.steps_per_s
    alone = np.where(snapshot.usable_steps_per_s > 0.0, snapshot.usable_steps_per_s, np.inf)
    single = order[type_of_job[order] >= 0]
    couples: list[tuple[int, int]] = []
    device_types: list[int] = []
    for job in order[type_of_job[order] < 0]:
        device_type = type_of_job[single]
        mine = beside[profile[job], profile[single], device_type] / alone[job, device_type]
        theirs = beside[profile[single], profile[job], device_type] / alone[single, device_type]
        is_legal = (mine > 0.0) & (theirs > 0.0) & (snapshot.gang[single] == snapshot.gang[job])
        gain = np.where(is_legal, mine + theirs, 0.0)
        if not len(gain) or gain.max() <= _WORTH_SHARING:
            continue
        partner = int(np.argmax(gain))
        couples.append((int(job), int(single[partner])))
        device_types.append(int(device_type[partner]))
        shares[single[partner], device_type[partner]] = 0.0
        single = np.delete(single, partner)
        if not len(single):
            break
    return np.array(couples, dtype=np.int64).reshape(-1, 2), np.array(device_types, dtype=np.int64)


def time_of_couples(
    snapshot: ClusterSnapshot, couples: LongArray, device_type: LongArray, amount: FloatArray
) -> tuple[SharedTime, PairedTime]:
    """Time of couples ``[couple, 2]``, summed by profile and per job."""
    assert snapshot.pairs is not None
    profile = snapshot.pairs.profile_of[couples]
    keys, at = np.unique(
        np.column_stack([np.sort(profile, axis=1), device_type]), axis=0, return_inverse=True
    )
    total = np.asarray(np.bincount(at.reshape(-1), amount, len(keys)), dtype=float)
    shared = SharedTime(
        profile_a=keys[:, 0], profile_b=keys[:, 1], device_type=keys[:, 2], amount=total
    )
    paired = PairedTime(
        job=couples.T.ravel(),
        profile=profile[:, ::-1].T.ravel(),
        device_type=np.tile(device_type, 2),
        amount=np.tile(amount, 2),
    )
    return shared, paired
