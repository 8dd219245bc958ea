"""Estimates for jobs without measurements: speeds on other device types, and beside other jobs.

A job without stated throughputs counts as one step per second everywhere until it is measured. Its
first measurement shows how much work a step is, not that the first device type is faster than the
others, so untried device types count as equally fast. With ``estimate = true`` their speeds are
predicted from a table of other jobs instead (`serve --throughputs`; Narayanan et al., OSDI 2020,
section 3.3), one standard deviation above the mean, so that the job is tried there. The fraction of
its speed that a job keeps beside another job is completed from measured pairs, of this fleet and of
the table.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.fleet.rounds.interference import learn_alone, with_estimates, with_profile
from hocket.fleet.rounds.state import FleetState, PairEstimates, Rules
from hocket.fleet.throughputs.table import JobProfile, Throughputs
from hocket.fleet.throughputs.unseen import belief_from, complete
from hocket.service.spec import JobSpec, is_preemptible

_BOLDNESS = 1.0
"""Standard deviations above the most likely speed at which untried device types are estimated."""
_USUAL_PART = 0.6
"""Fraction of its speed that a job keeps beside another without any measurement. The median of
Gavel's published pairs is 0.68 on V100, 0.59 on P100 and 0.54 on K80.
"""
_LEAST_PART = 0.05


def refuse_estimates(spec: JobSpec, rules: Rules, reference: Throughputs | None) -> None:
    """Raise `UsageError` for a job that needs estimates which this service cannot make."""
    if spec.estimate and reference is None:
        hint = "start hocket fleet serve with --throughputs FILE"
        raise UsageError(
            "the service has no throughput table to estimate this job from",
            hint=hint,
            where="estimate",
        )
    if not spec.space_sharing:
        return
    if not allows_sharing(rules):
        hint = "leave it out, or serve with --policy las"
        message = f"jobs run alone under {rules.policy}"
    elif spec.gangs is not None:
        message, hint = "a job of several sizes runs alone", "give one gang"
    elif not is_preemptible(spec):
        message = "a job that shares devices must save its work when it is stopped"
        hint = "add preemptible = true, or resume with the arguments to go on with"
    else:
        return
    raise UsageError(message, hint=hint, where="space_sharing")


def allows_sharing(rules: Rules) -> bool:
    """False for first come, first served policies, in which jobs keep their place in the queue."""
    return not rules.policy.startswith("fifo") and rules.mechanism != "gavel"


def with_spec_profile(
    state: FleetState,
    spec: JobSpec,
    owner: str,
    alone: tuple[float, ...],
    reference: Throughputs | None,
) -> tuple[FleetState, int]:
    """The state in which a job may share devices, and the job's profile (-1 if it may not share).

    Jobs of one owner, name and gang have one profile.
    """
    if not spec.space_sharing:
        return state, -1
    profile = json.dumps([owner, spec.name, spec.gang])
    device_types = state.device_types
    return with_profile(state, profile, alone, lambda known: _parts(known, device_types, reference))


def with_other_types_estimated(
    state: FleetState, number: int, spec: JobSpec, reference: Throughputs | None
) -> FleetState:
    """The state after a measurement of a job, with new estimates for other device types and
    pairs."""
    at, before = state.row_of(number), state
    if spec.throughputs is None:
        state = _with_untried(state, at, spec, reference)
    known = state.pair_estimates
    if known is None:
        return state
    if state is not before:
        state = learn_alone(state, state.jobs, at)
        known = state.pair_estimates or known
    return with_estimates(state, replace(known, part=_parts(known, state.device_types, reference)))


def _with_untried(
    state: FleetState, at: int, spec: JobSpec, reference: Throughputs | None
) -> FleetState:
    jobs, device_type = state.jobs, int(state.jobs.rows["device_type"][at])
    # Gavel's rounds reset the time received on a type, so it does not show where a job has run.
    untried = np.flatnonzero(jobs.received_s[at] == 0.0)
    if device_type < 0 or not len(untried) or state.rules.mechanism == "gavel":
        return state
    known = jobs.spread_steps_per_s if jobs.rows["is_spread"][at] else jobs.steps_per_s
    together, spread = jobs.steps_per_s.copy(), jobs.spread_steps_per_s.copy()
    guess = np.full(state.num_types, known[at, device_type])
    if spec.estimate and reference is not None and known[at, device_type] > 0.0:
        tried = [one for one in np.flatnonzero(jobs.received_s[at] > 0.0) if known[at, one] > 0.0]
        alone = {state.device_types[one]: float(known[at, one]) for one in tried}
        profile = JobProfile(spec.name, spec.gang)
        guess = belief_from(reference, profile, alone).steps_per_s(_BOLDNESS)
    together[at, untried] = spread[at, untried] = guess[untried]
    return state.but(jobs=jobs._replace(steps_per_s=together, spread_steps_per_s=spread))


def _parts(
    known: PairEstimates, device_types: tuple[str, ...], reference: Throughputs | None
) -> FloatArray:
    """Fractions of their speed that paired profiles keep: measured if known, else completed."""
    own = [JobProfile(*json.loads(profile)[1:]) for profile in known.profiles]
    gang = np.array([profile.gang for profile in own])
    part = np.where(known.is_measured, known.part, np.nan)
    part[gang[:, None] != gang[None, :]] = 0.0
    others = [] if reference is None else [
        row for row, profile in enumerate(reference.profiles) if profile.gang in gang
    ]  # fmt: skip
    if reference is not None and others:
        table = reference.only(others)
        alone = np.where(table.alone > 0.0, table.alone, np.inf)
        measured = table.beside / alone[:, None, :]
        rows = [table.find(*profile) for profile in own]
        for a, b in np.argwhere(np.isnan(part).all(axis=2)):
            if rows[a] >= 0 and rows[b] >= 0:
                part[a, b] = measured[rows[a], rows[b]]
    # One more profile with the usual fraction, which pulls the completion of all others towards it.
    size = len(own) + 1
    whole = np.full((size, size, len(device_types)), _USUAL_PART)
    whole[:-1, :-1] = np.where(part > 0.0, part, np.nan)
    filled = complete(whole.reshape(size, -1)).reshape(whole.shape)[:-1, :-1]
    estimate = np.clip(filled, _LEAST_PART, 1.0)
    return np.where(np.isnan(part), estimate, part)
