"""The round mechanism of Narayanan et al., OSDI 2020, section 5, as the authors' code has it.

Jobs are taken by their share over the time that they received since the last
allocation, kind by kind; ties go to the larger debt of earlier allocations. Allocations are at
least 32 minutes apart, and a job that came since the last one holds a place without being started.
O(kinds x jobs log jobs) per round.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from hocket.base.errors import UsageError
from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.assign import assign
from hocket.fleet.rounds.share import share
from hocket.fleet.rounds.state import FleetState, Jobs
from hocket.fleet.rounds.tables import NO_PAIRS, Asked

NOT_AS_GAVEL: Final = {
    "finish-time-fairness": "among equal answers Gavel takes the one at which its solver of cone "
    "programs happens to stop, which is not repeated here (average completion 14 % off)",
    "ftf-agnostic": "among equal answers Gavel takes the one at which its solver of cone programs "
    "happens to stop, which is not repeated here (average completion 17 % off)",
    "fifo-agnostic": "Gavel's own gives some kinds to more jobs than they have devices, which is "
    "not repeated here (average completion 26 % off)",
}
"""Policies whose results in these rounds are not those of Gavel, and why."""


def refuse_non_gavel(policy: str) -> None:
    """Raise `UsageError` for a policy that could not be compared with Gavel's own results."""
    reason = NOT_AS_GAVEL.get(policy)
    if reason is not None:
        hint = "leave out --compatible gavel, or compare las or fifo"
        raise UsageError(f"{policy!r} cannot be run as Gavel does: {reason}", hint=hint)


def begin_round(state: FleetState, jobs: Jobs) -> tuple[FleetState, Actions]:
    """A round of Gavel; ``jobs`` are counted up to now, writable and without ended ones."""
    if state.is_dirty and state.time_s - state.solved_s >= state.rules.min_reset_s:
        state = _reset(state, jobs)
    return assign(state, jobs, _asked(state), keeps_running=False)


def _reset(state: FleetState, jobs: Jobs) -> FleetState:
    """Fold the time received into debts and compute new shares."""
    half_s = state.rules.round_s / 2.0
    if np.isfinite(state.solved_s):
        # A job without a share had no deficit and received nothing.
        deficit_s = jobs.shares * (state.time_s - state.solved_s)
        jobs.credit_s[:] += deficit_s - (jobs.received_s - half_s)
    jobs.received_s[:] = half_s
    return share(state, jobs)


def _asked(state: FleetState) -> Asked:
    """Kinds as they are listed, fastest first; in random order for a policy that sees no speeds."""
    if not state.rules.policy.endswith("agnostic"):
        return _as_listed(state.num_kinds)
    random = np.random.default_rng((state.rules.seed, state.round_number))
    return NO_PAIRS._replace(kinds=random.permutation(state.num_kinds))


@lru_cache(maxsize=64)
def _as_listed(num_kinds: int) -> Asked:
    return NO_PAIRS._replace(kinds=np.arange(num_kinds))
