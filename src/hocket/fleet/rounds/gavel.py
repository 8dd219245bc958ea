"""The round mechanism of Narayanan et al., OSDI 2020, section 5, as in the authors' code.

For each device type, jobs are sorted by their share divided by the time that they received since
the last allocation; ties go to the larger deficit of earlier allocations. Allocations are at least
32 minutes apart. A job that arrived since the last allocation takes a place without being started,
as in that code.

O(types x jobs log jobs) per round.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hocket.base.errors import UsageError
from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.assign import assign
from hocket.fleet.rounds.share import solve_shares
from hocket.fleet.rounds.state import FleetState, Jobs
from hocket.fleet.rounds.tables import NO_PAIRS, Asked

NOT_AS_GAVEL: Final = {
    "finish-time-fairness": "among equal answers Gavel takes the one at which its solver of cone "
    "programs happens to stop, which is not repeated here (average completion 14 % off)",
    "ftf-agnostic": "among equal answers Gavel takes the one at which its solver of cone programs "
    "happens to stop, which is not repeated here (average completion 17 % off)",
    "fifo-agnostic": "Gavel's own gives some types to more jobs than they have devices, which is "
    "not repeated here (average completion 26 % off)",
}
"""Policies whose results in these rounds are not those of Gavel, and why."""


_GANGS_NOT_AS_GAVEL: Final = (
    "with gangs, many allocations have the same lowest job, and Gavel takes the one at which its "
    "solver happens to stop, which is not repeated here (average completion 24 % lower here)"
)
"""Why max-min fairness of gangs is not that of Gavel."""


def refuse_non_gavel(policy: str, *, has_gangs: bool = False) -> None:
    """Raise `UsageError` for a policy whose results here differ from Gavel's by more than 3 %."""
    reason = NOT_AS_GAVEL.get(policy)
    if reason is None and has_gangs and policy == "las":
        reason = _GANGS_NOT_AS_GAVEL
    if reason is not None:
        hint = "leave out --compatible gavel, or compare fifo, or las with jobs of one device"
        raise UsageError(f"{policy!r} cannot be run as Gavel does: {reason}", hint=hint)


def begin_round(state: FleetState, jobs: Jobs) -> tuple[FleetState, Actions]:
    """Run one of Gavel's rounds; ``jobs`` are writable, without ended ones, with work counted up to
    now."""
    if state.is_dirty and state.time_s - state.solved_s >= state.rules.min_reset_s:
        state = _reset(state, jobs)
    return assign(state, jobs, _asked(state), is_refill=False)


def _reset(state: FleetState, jobs: Jobs) -> FleetState:
    """Add the time missed or received too much to the credits, and compute new shares."""
    # Gavel starts every count at half a round, so that nothing divides by zero.
    half_s = state.rules.round_s / 2.0
    if np.isfinite(state.solved_s):
        # A job without a share had no deficit and received nothing.
        deficit_s = jobs.shares * (state.time_s - state.solved_s)
        jobs.credit_s[:] += deficit_s - (jobs.received_s - half_s)
    jobs.received_s[:] = half_s
    return solve_shares(state, jobs)


def _asked(state: FleetState) -> Asked:
    """Device types in the order in which they are handed out: as listed, or shuffled for agnostic
    policies."""
    if not state.rules.policy.endswith("agnostic"):
        return NO_PAIRS._replace(device_types=np.arange(state.num_types))
    random = np.random.default_rng((state.rules.seed, state.round_number))
    return NO_PAIRS._replace(device_types=random.permutation(state.num_types))
