"""The round mechanism of Narayanan et al., OSDI 2020, section 5, as the authors' code has it.

Jobs are taken by the share that they are owed over the time that they received since the last
allocation, kind by kind; ties go to the larger debt of earlier allocations. Allocations are at
least 32 minutes apart, and a job that came since the last one holds a place without being started.
O(kinds x jobs log jobs) per round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.assign import assign
from hocket.fleet.rounds.share import share
from hocket.fleet.rounds.state import Jobs, State
from hocket.fleet.rounds.tables import new_wishes

Counts = NDArray[np.int64]

_NO_PAIRS = np.zeros((0, 3), dtype=np.int64)
_NO_QUEUE = np.zeros(0, dtype=np.int64)
_NO_PROFILES = np.zeros((0, 2), dtype=np.int64)


def begin_round(state: State, jobs: Jobs) -> tuple[State, Actions]:
    """A round of Gavel; ``jobs`` are counted up to now, writable and without ended ones."""
    from hocket.fleet.rounds.kernels.order import order_by_share

    if state.is_dirty and state.time_s - state.solved_s >= state.rules.min_reset_s:
        state = _reset(state, jobs)
    wishes = new_wishes(len(jobs.rows), state.num_kinds, _NO_PAIRS, _NO_QUEUE, _NO_PROFILES)
    num_parts = order_by_share(jobs, _kinds_in_turn(state), state.layout.largest_server, wishes)
    return assign(state, jobs, num_parts, wishes, keeps_running=False)


def _reset(state: State, jobs: Jobs) -> State:
    """Fold the time received into debts and compute new shares."""
    half_s = state.rules.round_s / 2.0
    if np.isfinite(state.solved_s):
        # A job without a share was owed nothing and received nothing.
        owed_s = jobs.shares * (state.time_s - state.solved_s)
        jobs.credit_s[:] += owed_s - (jobs.received_s - half_s)
    jobs.received_s[:] = half_s
    return share(state, jobs)


def _kinds_in_turn(state: State) -> Counts:
    """Kinds as they are listed, fastest first; in random order for a policy that sees no speeds."""
    if not state.rules.policy.endswith("agnostic"):
        return np.arange(state.num_kinds)
    return np.random.default_rng((state.rules.seed, state.round_number)).permutation(
        state.num_kinds
    )
