"""Interference between jobs that share devices, learned from their reports.

A running fleet knows neither which jobs will arrive nor how they slow each other down, so the table
of pairs grows with the jobs that may share. For each job beside each other job it holds the
fraction of its speed that it keeps. This fraction is estimated first, and measured once the two
have run together. It is 0 from then on if one of them failed there.

Simulated traces have a table of their own and no estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.fleet.rounds.state import FleetState, Jobs, PairEstimates, PairPlan, PairTable

MAX_PROFILES = 32
"""Maximum profiles of jobs that share devices; jobs of further profiles run alone while all of
these are in use."""
_LEARNING = 0.5
"""Weight of a new measurement of a part against all before."""

EstimateParts = Callable[[PairEstimates], FloatArray]
"""Part that each profile keeps beside each other on each device type, measured ones included."""


def with_profile(
    state: FleetState, profile: str, alone: tuple[float, ...], estimate: EstimateParts
) -> tuple[FleetState, int]:
    """Add a profile whose jobs may share devices; returns the state and the row of the profile, -1
    if there are too many."""
    known = state.pair_estimates or _nothing(state.num_types)
    if profile in known.profiles:
        return state, known.profiles.index(profile)
    at = len(known.profiles)
    if at < MAX_PROFILES:
        known = _grown(known)
    else:
        used = set(state.jobs.rows["profile"].tolist())
        at = next((row for row in range(MAX_PROFILES) if row not in used), -1)
        if at < 0:
            return state, -1
    profiles = [*known.profiles]
    profiles[at] = profile
    measured, own = known.is_measured.copy(), known.alone.copy()
    measured[at, :] = measured[:, at] = False
    own[at] = alone
    known = replace(known, profiles=tuple(profiles), is_measured=measured, alone=own)
    return with_estimates(state, replace(known, part=estimate(known))), at


def with_estimates(state: FleetState, known: PairEstimates) -> FleetState:
    """Replace the estimates, and compute the table of pairs from them; profiles may be added."""
    # The last profile is that of jobs that share with nobody.
    last, more = state.num_profiles, len(known.profiles) - state.num_profiles
    steps_per_s = np.pad(known.part * known.alone[:, None, :], ((0, 1), (0, 1), (0, 0)))
    plan = state.pair_plan or PairPlan(amount=steps_per_s * 0.0, credit_s=steps_per_s * 0.0)
    jobs = state.jobs
    if state.pair_table is None or more:
        rows = jobs.rows.copy()
        # Without a table, nobody shares.
        rows["profile"][(rows["profile"] == last) | (state.pair_table is None)] += more
        jobs = jobs._replace(rows=rows)
    if state.pair_table is not None and more:
        wider = [(0, more), (0, more), (0, 0)]
        plan = PairPlan(amount=np.pad(plan.amount, wider), credit_s=np.pad(plan.credit_s, wider))
    return state.but(
        jobs=jobs,
        pair_estimates=known,
        pair_table=PairTable(steps_per_s=steps_per_s),
        pair_plan=plan,
        is_dirty=True,
    )


def with_more_types(state: FleetState, count: int) -> FleetState:
    """Extend the tables by new device types, on which no pair is known to share yet."""
    known, plan = state.pair_estimates, state.pair_plan
    if known is None or plan is None:
        return state
    wider = [(0, 0), (0, 0), (0, count)]
    known = replace(
        known,
        alone=np.pad(known.alone, wider[1:]),
        part=np.pad(known.part, wider),
        is_measured=np.pad(known.is_measured, wider),
    )
    plan = PairPlan(amount=np.pad(plan.amount, wider), credit_s=np.pad(plan.credit_s, wider))
    return with_estimates(state.but(pair_plan=plan), known)


def without_pairs(state: FleetState) -> FleetState:
    """Turn sharing off."""
    rows = state.jobs.rows.copy()
    rows["profile"] = 0
    jobs = state.jobs._replace(rows=rows)
    return state.but(jobs=jobs, pair_table=None, pair_plan=None, pair_estimates=None)


def learn_alone(state: FleetState, jobs: Jobs, at: int) -> FleetState:
    """Copy the measured throughput of a job alone to its profile."""
    known, profile = state.pair_estimates, int(jobs.rows["profile"][at])
    if known is None or profile >= len(known.profiles):
        return state
    alone = known.alone.copy()
    alone[profile] = jobs.steps_per_s[at]
    return with_estimates(state, replace(known, alone=alone))


def learn_together(
    state: FleetState, jobs: Jobs, at: int, partner: int, steps_per_s: float
) -> FleetState:
    """Update the part of its speed that a job keeps beside its partner; ``at`` and ``partner`` are
    rows."""
    device_type = int(jobs.rows["device_type"][at])
    known = jobs.spread_steps_per_s if jobs.rows["is_spread"][at] else jobs.steps_per_s
    alone = float(known[at, device_type])
    if state.pair_estimates is None or not alone > 0.0:
        return state
    # No job is faster beside another; anything above is noise of the measurement.
    part = min(steps_per_s / alone, 1.0)
    return _with_part(state, jobs, [(at, partner)], device_type, part, _LEARNING)


def forbid_pair(state: FleetState, jobs: Jobs, at: int, partner: int) -> FleetState:
    """Forbid two profiles to share again after one of them failed beside the other."""
    device_type = int(jobs.rows["device_type"][at])
    return _with_part(state, jobs, [(at, partner), (partner, at)], device_type, 0.0, 1.0)


def _with_part(
    state: FleetState,
    jobs: Jobs,
    pairs: list[tuple[int, int]],
    device_type: int,
    value: float,
    weight: float,
) -> FleetState:
    known, profile = state.pair_estimates, jobs.rows["profile"]
    if known is None:
        return state
    part, measured = known.part.copy(), known.is_measured.copy()
    for one, other in pairs:
        key = int(profile[one]), int(profile[other]), device_type
        if part[key] > 0.0 or not measured[key]:
            part[key] += (weight if measured[key] else 1.0) * (value - part[key])
        measured[key] = True
    return with_estimates(state, replace(known, part=part, is_measured=measured))


def _nothing(num_types: int) -> PairEstimates:
    nothing = np.zeros((0, 0, num_types))
    return PairEstimates(
        profiles=(),
        alone=np.zeros((0, num_types)),
        part=nothing,
        is_measured=np.zeros(nothing.shape, dtype=np.bool_),
    )


def _grown(known: PairEstimates) -> PairEstimates:
    """Copy the tables with space for one more profile."""
    wider = [(0, 1), (0, 1), (0, 0)]
    measured: BoolArray = np.pad(known.is_measured, wider)
    return PairEstimates(
        profiles=(*known.profiles, ""),
        alone=np.pad(known.alone, wider[1:]),
        part=np.pad(known.part, wider),
        is_measured=measured,
    )
