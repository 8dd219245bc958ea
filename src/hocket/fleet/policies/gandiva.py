"""Gandiva as a baseline: equal time for everybody, and pairs by trial when there is not enough.

Xiao et al., "Gandiva", OSDI 2018, as OSDI 2020 compares with it: kinds of devices count as equal;
when jobs want more devices than there are, jobs of equal gang are put together at random (here
from a fixed seed) and stay together where both do at least what taking turns would do.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.allocation import Allocation, PairedTime, SharedTime, Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.lists import time_of_couples

_SEED = 0


def gandiva(market: Market, warm: Warm | None = None) -> Allocation:
    """Every job or pair has the same part of the time, spread over kinds by their number."""
    can_use = market.usable_steps_per_s > 0.0
    wanted = float(market.gang[can_use.any(axis=1)].sum())
    couples = np.zeros((0, 2), dtype=np.int64)
    if market.pairs is not None and wanted > market.num_devices.sum():
        couples = _couples(market)
    is_single = np.ones(market.num_jobs, dtype=bool)
    is_single[couples.reshape(-1)] = False
    singles = np.flatnonzero(is_single)
    usable = np.vstack([can_use[singles], can_use[couples[:, 0]] & can_use[couples[:, 1]]])
    gang = np.concatenate([market.gang[singles], market.gang[couples[:, 0]]])
    time = _equal_time(market, usable, gang)
    shares = np.zeros(can_use.shape)
    shares[singles] = time[: len(singles)]
    least = float(time.sum(axis=1)[usable.any(axis=1)].min(initial=1.0))
    shared, paired = _together(market, couples, time[len(singles) :])
    return Allocation(
        policy="gandiva",
        shares=shares,
        shared=shared,
        paired=paired,
        objective=least,
        bound=least,
        notes={"rule": "equal time, no better answer to it", "pairs": str(len(couples))},
    )


def _equal_time(market: Market, usable: BoolArray, gang: LongArray) -> FloatArray:
    """Time by number of devices, cut where a kind would be used beyond what it has."""
    devices = market.num_devices
    part = usable * devices[None, :].astype(float)
    part = part / np.maximum(part.sum(axis=1, keepdims=True), 1.0)
    used = gang @ part
    room = np.min(devices[used > 0] / used[used > 0], initial=1.0)
    return np.asarray(part * room)


def _couples(market: Market) -> LongArray:
    """Jobs put together at random that do better than taking turns on every kind."""
    assert market.pairs is not None
    shuffled = np.random.default_rng(_SEED).permutation(market.num_jobs)
    shuffled = shuffled[np.argsort(market.gang[shuffled], kind="stable")]
    left, right = shuffled[0:-1:2], shuffled[1::2]
    profile, beside = market.pairs.profile_of, market.pairs.steps_per_s
    alone = np.where(market.usable_steps_per_s > 0.0, market.usable_steps_per_s, np.inf)
    mine = beside[profile[left], profile[right]] / alone[left]
    theirs = beside[profile[right], profile[left]] / alone[right]
    is_used = (market.usable_steps_per_s[left] > 0.0) & (market.usable_steps_per_s[right] > 0.0)
    pays = (mine > 0.0) & (theirs > 0.0) & (mine + theirs >= 1.0)
    stays = np.all(pays | ~is_used, axis=1) & is_used.any(axis=1)
    stays &= market.gang[left] == market.gang[right]
    return np.stack([left[stays], right[stays]], axis=1)


def _together(
    market: Market, couples: LongArray, time: FloatArray
) -> tuple[SharedTime | None, PairedTime | None]:
    if market.pairs is None:
        return None, None
    at, kind = np.nonzero(time)
    return time_of_couples(market, couples[at], kind, time[at, kind])
