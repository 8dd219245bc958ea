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

# Jobs that a policy leaves where its last answer put them, as long as there are devices.


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
        kind = int(np.argmax(had_all[job]))
        if snapshot.gang[job] <= free[kind]:
            free[kind] -= snapshot.gang[job]
            stays_on[job] = kind
    return stays_on


_WORTH_SHARING = 1.5


def fifo(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Jobs in order of arrival, each on its fastest free device type; running jobs stay."""
    order, liking = _stay(snapshot, snapshot.usable_steps_per_s)
    return _listed("fifo", snapshot, order, liking)


def fifo_strict(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """The shares of ``fifo``; rounds then let nobody overtake, while ``fifo`` backfills."""
    return replace(fifo(snapshot, warm), policy="fifo-strict")


def fifo_as_gavel(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Gavel's FIFO: a job that fits on no device type with enough free devices is skipped."""
    order = np.argsort(snapshot.arrival, kind="stable")
    return _listed("fifo", snapshot, order, snapshot.usable_steps_per_s, is_strict=False)


def fifo_agnostic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Jobs in order of arrival, each on any free device type; running jobs stay."""
    order, liking = _stay(snapshot, _drawn(snapshot.ids, snapshot.num_kinds))
    return _listed(
        "fifo-agnostic", snapshot, order, np.where(snapshot.steps_per_s > 0.0, liking, 0.0)
    )


def _stay(snapshot: ClusterSnapshot, liking: FloatArray) -> tuple[LongArray, FloatArray]:
    """Order of jobs (running ones first, then by arrival) and their preference for each device
    type."""
    stays_on = staying_on(snapshot)
    stay = np.flatnonzero(stays_on >= 0)
    liking = liking.copy()
    liking[stay, stays_on[stay]] = np.inf
    return np.lexsort((snapshot.arrival, stays_on < 0)), liking


def shortest_job_first(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """Shortest remaining time on the fastest device type first; overdue jobs come last."""
    remaining = known_remaining_steps(snapshot, "shortest-job-first")
    fastest = snapshot.usable_steps_per_s.max(axis=1, initial=0.0)
    length_s = remaining / np.where(fastest > 0.0, fastest, 1e-300)
    order = np.lexsort((snapshot.arrival, length_s, ~snapshot.keeps_word))
    return _listed("shortest-job-first", snapshot, order, snapshot.usable_steps_per_s)


def _drawn(names: tuple[str, ...], num_kinds: int) -> FloatArray:
    """``[job, type]``: a random preference above 0 that depends on the job name alone."""
    drawn = b"".join(_draw(name, num_kinds) for name in names)
    places = np.frombuffer(drawn, dtype=np.uint32).reshape(len(names), num_kinds)
    return places.astype(np.float64) + 1.0


def _draw(name: str, num_kinds: int) -> bytes:
    return shake_128(name.encode(errors="surrogatepass")).digest(4 * num_kinds)


def _listed(
    name: str,
    snapshot: ClusterSnapshot,
    order: LongArray,
    speed: FloatArray,
    *,
    is_strict: bool = True,
) -> Allocation:
    order = order[snapshot.usable_steps_per_s[order].any(axis=1)]
    shares = np.zeros(snapshot.steps_per_s.shape)
    kind_of = _place(snapshot, order, speed, is_strict)
    running = order[kind_of[order] >= 0]
    shares[running, kind_of[running]] = 1.0
    shared = paired = None
    if snapshot.pairs is not None:
        couples, kind = _join(snapshot, order, kind_of, shares)
        shared, paired = time_of_couples(snapshot, couples, kind, np.ones(len(kind)))
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
    kind_of = np.full(snapshot.num_jobs, -1)
    can_run = (speed > 0.0) & (snapshot.usable_steps_per_s > 0.0)
    for job in order:
        gang = snapshot.gang[job]
        has_capacity = free >= gang
        fits = can_run[job] & has_capacity
        if not fits.any():
            # Nobody behind may overtake on a device type that this job waits for.
            if is_strict:
                free[can_run[job]] = 0
            if not (free if is_strict else has_capacity).any():
                break
            continue
        # Of equally fast types, the one with most free devices.
        best = fits & (speed[job] == speed[job][fits].max())
        kind = int(np.argmax(np.where(best, free, -1)))
        kind_of[job] = kind
        free[kind] -= gang
    return kind_of


def _join(
    snapshot: ClusterSnapshot, order: LongArray, kind_of: LongArray, shares: FloatArray
) -> tuple[LongArray, LongArray]:
    """Let waiting jobs join the running job with the largest summed throughput; returns the couples
    of jobs and their device types."""
    assert snapshot.pairs is not None
    profile, beside = snapshot.pairs.profile_of, snapshot.pairs.steps_per_s
    alone = np.where(snapshot.usable_steps_per_s > 0.0, snapshot.usable_steps_per_s, np.inf)
    single = order[kind_of[order] >= 0]
    couples: list[tuple[int, int]] = []
    kinds: list[int] = []
    for job in order[kind_of[order] < 0]:
        kind = kind_of[single]
        mine = beside[profile[job], profile[single], kind] / alone[job, kind]
        theirs = beside[profile[single], profile[job], kind] / alone[single, kind]
        is_legal = (mine > 0.0) & (theirs > 0.0) & (snapshot.gang[single] == snapshot.gang[job])
        gain = np.where(is_legal, mine + theirs, 0.0)
        if not len(gain) or gain.max() <= _WORTH_SHARING:
            continue
        partner = int(np.argmax(gain))
        couples.append((int(job), int(single[partner])))
        kinds.append(int(kind[partner]))
        shares[single[partner], kind[partner]] = 0.0
        single = np.delete(single, partner)
        if not len(single):
            break
    return np.array(couples, dtype=np.int64).reshape(-1, 2), np.array(kinds, dtype=np.int64)


def time_of_couples(
    snapshot: ClusterSnapshot, couples: LongArray, kind: LongArray, amount: FloatArray
) -> tuple[SharedTime, PairedTime]:
    """Time of couples ``[couple, 2]``, summed by profile and per job."""
    assert snapshot.pairs is not None
    profile = snapshot.pairs.profile_of[couples]
    keys, at = np.unique(
        np.column_stack([np.sort(profile, axis=1), kind]), axis=0, return_inverse=True
    )
    total = np.asarray(np.bincount(at.reshape(-1), amount, len(keys)), dtype=float)
    shared = SharedTime(profile_a=keys[:, 0], profile_b=keys[:, 1], kind=keys[:, 2], amount=total)
    paired = PairedTime(
        job=couples.T.ravel(),
        profile=profile[:, ::-1].T.ravel(),
        kind=np.tile(kind, 2),
        amount=np.tile(amount, 2),
    )
    return shared, paired
