"""First come, first served, and shortest job first: jobs in order, each to the best free devices.

Each job in turn takes the kind on which it is fastest among those with enough free devices; the
first that finds none ends the list, so that nobody overtakes. Where jobs may share devices, waiting
jobs then join running ones of equal gang, if both together do more than 1.5 of what each does alone
(the rule of the baselines of OSDI 2020). O(jobs that run x kinds), plus pairs.
"""

from __future__ import annotations

from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.fleet.allocation import Allocation, SharedTime, Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.normalise import known_remaining_steps, per_unit
from hocket.fleet.policies.staying import staying_on

Counts = NDArray[np.int64]

_WORTH_SHARING = 1.5


def fifo(market: Market, warm: Warm | None = None) -> Allocation:
    """Jobs in order of arrival, each where it is fastest."""
    order = np.argsort(market.arrival, kind="stable")
    return _listed("fifo", market, order, market.usable_steps_per_s)


def fifo_agnostic(market: Market, warm: Warm | None = None) -> Allocation:
    """Jobs in order of arrival, each to any kind with free devices; those who had one stay."""
    stays_on = staying_on(market)
    order = np.lexsort((market.arrival, stays_on < 0))
    liking = _drawn(market.ids, market.num_kinds)
    stay = np.flatnonzero(stays_on >= 0)
    liking[stay, stays_on[stay]] = np.inf
    return _listed("fifo-agnostic", market, order, np.where(market.steps_per_s > 0.0, liking, 0.0))


def shortest_job_first(market: Market, warm: Warm | None = None) -> Allocation:
    """The job that would end first on its fastest devices goes first."""
    remaining = known_remaining_steps(market, "shortest-job-first")
    fastest = market.usable_steps_per_s.max(axis=1, initial=0.0)
    length_s = remaining / np.where(fastest > 0.0, fastest, 1e-300)
    order = np.lexsort((market.arrival, length_s))
    return _listed("shortest-job-first", market, order, market.usable_steps_per_s)


def _drawn(names: tuple[str, ...], num_kinds: int) -> FloatArray:
    """``[job, kind]``: a draw above 0 that hangs on the job's name only, so always the same."""
    drawn = b"".join(_draw(name, num_kinds) for name in names)
    places = np.frombuffer(drawn, dtype=np.uint32).reshape(len(names), num_kinds)
    return places.astype(np.float64) + 1.0


def _draw(name: str, num_kinds: int) -> bytes:
    return shake_128(name.encode(errors="surrogatepass")).digest(4 * num_kinds)


def _listed(name: str, market: Market, order: Counts, speed: FloatArray) -> Allocation:
    order = order[market.usable_steps_per_s[order].any(axis=1)]
    shares = np.zeros(market.steps_per_s.shape)
    kind_of, num_placed = _place(market, order, speed)
    running = order[:num_placed]
    shares[running, kind_of[running]] = 1.0
    shared = None if market.pairs is None else _join(market, order, num_placed, kind_of, shares)
    fastest = market.usable_steps_per_s.max(axis=1, initial=0.0)
    served = (per_unit(market.usable_steps_per_s, fastest) * shares).sum(axis=1)
    objective = float((served[order] * np.arange(len(order), 0, -1)).sum())
    notes = {"rule": "jobs in order; there is no better answer to the rule", "run": str(num_placed)}
    return Allocation(
        policy=name,
        shares=shares,
        shared=shared,
        objective=objective,
        bound=objective,
        notes=notes,
    )


def _place(market: Market, order: Counts, speed: FloatArray) -> tuple[Counts, int]:
    """The kind of each job that runs, and how many of the first jobs do."""
    free = market.num_devices.astype(np.int64)
    pool_of = market.pool_of
    kind_of = np.full(market.num_jobs, -1)
    for position, job in enumerate(order):
        gang = market.gang[job]
        fits = (speed[job] > 0.0) & (free[pool_of] >= gang)
        if not fits.any():
            return kind_of, position
        best = fits & (speed[job] == speed[job][fits].max())
        kind = int(np.argmax(np.where(best, free[pool_of], -1)))
        kind_of[job] = kind
        free[pool_of[kind]] -= gang
    return kind_of, len(order)


def _join(
    market: Market, order: Counts, num_placed: int, kind_of: Counts, shares: FloatArray
) -> SharedTime:
    """Waiting jobs join the running job beside which both do most; those lose their own time."""
    assert market.pairs is not None
    profile, beside = market.pairs.profile_of, market.pairs.steps_per_s
    alone = np.where(market.usable_steps_per_s > 0.0, market.usable_steps_per_s, np.inf)
    single = order[:num_placed]
    joined: list[tuple[int, int, int]] = []
    for job in order[num_placed:]:
        kind = kind_of[single]
        mine = beside[profile[job], profile[single], kind] / alone[job, kind]
        theirs = beside[profile[single], profile[job], kind] / alone[single, kind]
        is_legal = (mine > 0.0) & (theirs > 0.0) & (market.gang[single] == market.gang[job])
        gain = np.where(is_legal, mine + theirs, 0.0)
        if not len(gain) or gain.max() <= _WORTH_SHARING:
            continue
        partner = int(np.argmax(gain))
        low, high = sorted((int(profile[job]), int(profile[single[partner]])))
        joined.append((low, high, int(kind[partner])))
        shares[single[partner], kind[partner]] = 0.0
        single = np.delete(single, partner)
        if not len(single):
            break
    return shared_by_profile(np.array(joined, dtype=np.int64).reshape(-1, 3), np.ones(len(joined)))


def shared_by_profile(triples: Counts, amount: FloatArray) -> SharedTime:
    """Time in pairs, summed over equal (profile, profile, kind)."""
    keys, at = np.unique(triples, axis=0, return_inverse=True)
    total = np.asarray(np.bincount(at.reshape(-1), amount, len(keys)), dtype=float)
    return SharedTime(profile_a=keys[:, 0], profile_b=keys[:, 1], kind=keys[:, 2], amount=total)
