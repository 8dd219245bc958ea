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
from hocket.fleet.rounds.state import PAUSED, Jobs, State
from hocket.fleet.rounds.tables import Choice

Counts = NDArray[np.int64]


def begin_round(state: State, jobs: Jobs) -> tuple[State, Actions]:
    """A round of Gavel; ``rows`` are counted up to now, writable and without ended jobs."""
    if state.is_dirty and state.time_s - state.solved_s >= state.rules.min_reset_s:
        state = _reset(state, jobs)
    choice = Choice(kind=np.full(len(jobs.rows), -1), partner=np.full(len(jobs.rows), -1))
    if len(jobs.rows):
        _choose(state, jobs, choice)
    # A job without an allocation holds a place in the count and is then not started.
    choice.kind[jobs.rows["has_share"] == 0] = -1
    return assign(state, jobs, choice)


def _reset(state: State, jobs: Jobs) -> State:
    """Fold the time received into debts and compute new shares."""
    half_s = state.rules.round_s / 2.0
    if np.isfinite(state.solved_s):
        # A job without a share was owed nothing and received nothing.
        owed_s = jobs.shares * (state.time_s - state.solved_s)
        jobs.credit_s[:] += owed_s - (jobs.received_s - half_s)
    jobs.received_s[:] = half_s
    return share(state, jobs)


def _choose(state: State, jobs: Jobs, choice: Choice) -> None:
    from hocket.fleet.rounds.kernel import choose

    none = np.zeros(0, dtype=np.int64)
    choose(
        jobs,
        _wishes(state, jobs),
        np.zeros(len(jobs.rows), dtype=bool),
        none.reshape(0, 3),
        none,
        none.reshape(0, 2),
        state.num_devices,
        choice,
    )


def _wishes(state: State, jobs: Jobs) -> Counts:
    """All jobs for each kind in turn, the most urgent first."""
    shares = np.where(jobs.steps_per_s > 0.0, jobs.shares, 0.0)
    urgency = shares / np.maximum(jobs.received_s, 1e-9)
    # Jobs that came since the last allocation stand behind all others.
    urgency[jobs.rows["has_share"] == 0] = -1.0
    order = np.lexsort((-shares, -np.round(jobs.credit_s, 3), -urgency), axis=0)
    wishes = order * state.num_kinds + np.arange(state.num_kinds)
    wishes = wishes[:, _kinds_in_turn(state)].T.reshape(-1)
    is_paused = jobs.rows["phase"] == PAUSED
    return wishes[~is_paused[wishes // state.num_kinds]] if is_paused.any() else wishes


def _kinds_in_turn(state: State) -> Counts:
    """Kinds as they are listed, fastest first; in random order for a policy that sees no speeds."""
    if not state.rules.policy.endswith("agnostic"):
        return np.arange(state.num_kinds)
    return np.random.default_rng((state.rules.seed, state.round_number)).permutation(
        state.num_kinds
    )
