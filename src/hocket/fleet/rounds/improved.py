"""Rounds that pay debts: every job is owed its share of time and gets what it is owed most.

Shares earn credit in seconds for a kind of device, holding devices spends it, and the largest
credit goes first (deficit round robin: Shreedhar and Varghese, SIGCOMM 1995). A running job keeps
its devices until another is owed some rounds more, which saves preemptions, and within a slack the
job that ends sooner goes first, which shortens the average; one that is owed too much goes before
all, and what does not suffice for its gang is kept for it. Of running jobs that are owed the same,
the one is stopped that did least since its last checkpoint. Devices that nobody is owed go to
whoever is fastest there. Between rounds, free devices are given out at once, by shares that know of
the change. Credits are compared in coarse units, so that noise of the solver decides nothing.
O(jobs x kinds log) per round.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.fleet.rounds.actions import NOTHING, Actions
from hocket.fleet.rounds.assign import assign
from hocket.fleet.rounds.share import share
from hocket.fleet.rounds.state import RUNNING, Jobs, Rules, State
from hocket.fleet.rounds.tables import Pace, Wishes, new_wishes

Counts = NDArray[np.int64]

_UNITS_PER_ROUND = 16.0
_NO_PAIRS = np.zeros((0, 3), dtype=np.int64)
_NO_QUEUE = np.zeros(0, dtype=np.int64)
_NO_PROFILES = np.zeros((0, 2), dtype=np.int64)


def begin_round(state: State, jobs: Jobs) -> tuple[State, Actions]:
    """A round; ``jobs`` are counted up to now, writable and without ended ones."""
    if state.is_dirty or _depends_on_time(state.rules.policy):
        state = _share(state, jobs)
    if state.pair_plan is not None:
        most_s = _pace(state.rules, False).most_owed_s
        np.clip(state.pair_plan.credit_s, -most_s, most_s, out=state.pair_plan.credit_s)
    num_parts, wishes = _wishes(state, jobs, only_waiting=False)
    return assign(state, jobs, num_parts, wishes, keeps_running=False)


def refill(state: State, jobs: Jobs) -> tuple[State, Actions]:
    """Give free devices to waiting jobs without touching those that run."""
    from hocket.fleet.rounds.kernels.release import can_start

    free = np.empty(state.num_kinds, dtype=np.int64)
    if not can_start(jobs, state.holders, state.layout, free):
        return state, NOTHING
    if state.is_dirty:
        state = _share(state, jobs)
    num_parts, wishes = _wishes(state, jobs, only_waiting=True)
    return assign(state, jobs, num_parts, wishes, keeps_running=True)


def _share(state: State, jobs: Jobs) -> State:
    """New shares, unless the last ones are too young."""
    is_due = state.time_s - state.solved_s >= state.rules.min_solve_s
    return share(state, jobs) if is_due else state


def _depends_on_time(policy: str) -> bool:
    """Whether a policy looks at what the jobs did since the last answer."""
    return policy.split("-agnostic")[0] in {
        "finish-time-fairness", "ftf", "makespan", "min-cost-slo", "shortest-job-first", "allox",
    }  # fmt: skip


def _wishes(state: State, jobs: Jobs, *, only_waiting: bool) -> tuple[int, Wishes]:
    """The wishes of all jobs and pairs, sorted."""
    from hocket.fleet.rounds.kernels.order import order_by_debt

    pairs, urgency = _pair_wishes(state)
    queue, queue_at = _queues(state, jobs)
    wishes = new_wishes(len(jobs.rows), state.num_kinds, pairs, queue, queue_at)
    if len(pairs):
        wishes.keys[:, -len(pairs) :] = 0.0
        wishes.keys[0, -len(pairs) :] = urgency
    pace, largest = _pace(state.rules, only_waiting), state.layout.largest_server
    return order_by_debt(jobs, state.time_s, pace, largest, wishes), wishes


@lru_cache(maxsize=64)
def _pace(rules: Rules, only_waiting: bool) -> Pace:
    return Pace(
        round_s=rules.round_s,
        stickiness_rounds=rules.stickiness_rounds,
        slack_rounds=rules.slack_rounds,
        patience_s=rules.patience_rounds * rules.round_s,
        min_run_s=rules.min_run_s,
        most_owed_s=2.0 * rules.patience_rounds * rules.round_s,
        only_waiting=only_waiting,
    )


def _pair_wishes(state: State) -> tuple[Counts, FloatArray]:
    """One wish per device that a pair of profiles is owed."""
    plan = state.pair_plan
    if plan is None or not plan.amount.any():
        return _NO_PAIRS, np.zeros(0)
    a, b, kind = np.nonzero(plan.amount)
    owed = plan.credit_s[a, b, kind] / state.rules.round_s
    copies = np.ceil(plan.amount[a, b, kind]).astype(np.int64) + 1
    which = np.repeat(np.arange(len(a)), copies)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(copies) - copies, copies)
    urgency = np.floor((owed[which] - nth + 1.0) * _UNITS_PER_ROUND) / _UNITS_PER_ROUND
    keep = urgency > 0.0
    return np.stack([a, b, kind], axis=1)[which][keep], urgency[keep]


def _queues(state: State, jobs: Jobs) -> tuple[Counts, Counts]:
    """Jobs of each profile that want to share, the neediest first."""
    if state.pair_plan is None:
        return _NO_QUEUE, _NO_PROFILES
    wants = np.flatnonzero(jobs.rows["phase"] <= RUNNING)
    stays = (jobs.rows["partner"][wants] >= 0) * state.rules.stickiness_rounds
    need = np.floor(
        (jobs.rows["pair_credit_s"][wants] / state.rules.round_s + stays) * _UNITS_PER_ROUND
    )
    queue = wants[np.lexsort((-need, jobs.rows["profile"][wants]))]
    num_profiles = len(state.pair_plan.amount)
    ends = np.searchsorted(jobs.rows["profile"][queue], np.arange(num_profiles + 1))
    return queue, np.stack([ends[:-1], ends[1:]], axis=1)
