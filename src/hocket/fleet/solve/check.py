"""Whether an allocation can be carried out: nobody has more time than there is, nor any device."""

from __future__ import annotations

import numpy as np

from hocket.arrays import FloatArray
from hocket.errors import CheckError
from hocket.fleet.allocation import Allocation
from hocket.fleet.market import Market

TOLERANCE = 1e-9


def verify_allocation(market: Market, allocation: Allocation) -> None:
    """Raise `CheckError` with everything that is wrong."""
    found = violations(market, allocation)
    if found:
        raise CheckError("; ".join(found[:5]), where=f"allocation by {allocation.policy}")


def violations(market: Market, allocation: Allocation) -> list[str]:
    """What is wrong with an allocation, in words."""
    shares = allocation.shares
    if shares.shape != market.steps_per_s.shape or not np.all(np.isfinite(shares)):
        return [f"shares have the shape {shares.shape} or are not numbers"]
    found = [
        f"job {market.ids[job]!r} has a share of {shares[job, kind]:g} on {market.kinds[kind]!r}"
        for job, kind in np.argwhere(shares < -TOLERANCE)
    ]
    found += [
        f"job {market.ids[job]!r} has time on {market.kinds[kind]!r}, where it cannot run"
        for job, kind in np.argwhere((shares > TOLERANCE) & (market.usable_steps_per_s <= 0.0))
    ]
    return found + _too_much_time(market, allocation) + _too_many_devices(market, allocation)


def throughputs(market: Market, allocation: Allocation) -> FloatArray:
    """Steps per second of each job; jobs of one profile share its time in pairs equally."""
    alone = (market.steps_per_s * allocation.shares).sum(axis=1)
    shared, pairs = allocation.shared, market.pairs
    if shared is None or pairs is None:
        return np.asarray(alone)
    beside = np.zeros(len(pairs.steps_per_s))
    a, b, kind = shared.profile_a, shared.profile_b, shared.kind
    np.add.at(beside, a, shared.amount * pairs.steps_per_s[a, b, kind])
    np.add.at(beside, b, shared.amount * pairs.steps_per_s[b, a, kind])
    num_jobs = np.bincount(pairs.profile_of, minlength=len(beside))
    return np.asarray(alone + (beside / np.maximum(num_jobs, 1))[pairs.profile_of])


def _too_much_time(market: Market, allocation: Allocation) -> list[str]:
    times = allocation.shares.sum(axis=1)
    found = [
        f"job {market.ids[job]!r} has {times[job]:.12g} of its time"
        for job in np.flatnonzero(times > 1.0 + TOLERANCE)
    ]
    shared, pairs = allocation.shared, market.pairs
    if shared is None or pairs is None:
        return found
    num_profiles = len(pairs.steps_per_s)
    taken = np.bincount(pairs.profile_of, times, num_profiles)
    taken += np.bincount(shared.profile_a, shared.amount, num_profiles)
    taken += np.bincount(shared.profile_b, shared.amount, num_profiles)
    num_jobs = np.bincount(pairs.profile_of, minlength=num_profiles)
    is_over = taken > num_jobs * (1.0 + TOLERANCE) + TOLERANCE
    return found + [
        f"the {num_jobs[one]} jobs of profile {one} have {taken[one]:.12g} of their time"
        for one in np.flatnonzero(is_over)
    ]


def _too_many_devices(market: Market, allocation: Allocation) -> list[str]:
    used = np.bincount(market.pool_of, market.gang @ allocation.shares, market.num_kinds)
    shared, pairs = allocation.shared, market.pairs
    if shared is not None and pairs is not None:
        gang_of = np.zeros(len(pairs.steps_per_s))
        gang_of[pairs.profile_of] = market.gang
        devices = shared.amount * gang_of[shared.profile_a]
        used += np.bincount(market.pool_of[shared.kind], devices, market.num_kinds)
    limit = market.num_devices * (1.0 + TOLERANCE) + TOLERANCE
    return [
        f"{used[kind]:.12g} devices of {market.kinds[kind]!r} are used, there are "
        f"{market.num_devices[kind]}"
        for kind in np.flatnonzero((used > limit) & (market.pool_of == np.arange(market.num_kinds)))
    ]
