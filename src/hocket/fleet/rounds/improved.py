"""Rounds that pay debts: every job is owed its share of time and gets what it is owed most.

Shares earn credit in seconds for a kind of device, holding devices spends it, and the largest
credit goes first (deficit round robin: Shreedhar and Varghese, SIGCOMM 1995). A running job keeps
its devices until another is owed some rounds more, which saves preemptions, and within a slack the
job that ends sooner goes first, which shortens the average; one that is owed too much goes before
all, and what does not suffice for its gang is kept for it. Devices that nobody is owed go to
whoever is fastest there. Between rounds, free devices are given out at once. Credits are compared
in coarse units, so that noise of the solver decides nothing.
O(jobs x kinds log) per round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.fleet.rounds.actions import NOTHING, Actions
from hocket.fleet.rounds.assign import assign, rows_of
from hocket.fleet.rounds.share import share
from hocket.fleet.rounds.state import PAUSED, RUNNING, WAITING, Jobs, State
from hocket.fleet.rounds.tables import Choice

Counts = NDArray[np.int64]

_UNITS_PER_ROUND = 16.0
_FIRST = 1e6
"""Rounds by which reserved jobs go before others, and protected ones before those."""
_HALF_ROUNDS = 300.0
"""Rounds that a job still needs where it may take half of the slack."""
_LAST = -1e6
"""Rounds by which wishes that nobody owes come after all debts."""


def begin_round(state: State, jobs: Jobs) -> tuple[State, Actions]:
    """A round; ``rows`` are counted up to now, writable and without ended jobs."""
    is_due = state.time_s - state.solved_s >= state.rules.min_solve_s
    if is_due and (state.is_dirty or _depends_on_time(state.rules.policy)):
        state = share(state, jobs)
    _clip(state, jobs)
    choice = Choice(kind=np.full(len(jobs.rows), -1), partner=np.full(len(jobs.rows), -1))
    if len(jobs.rows):
        wanting = np.flatnonzero(jobs.rows["phase"] != PAUSED)
        wishes = wishes_of(state, jobs, wanting)
        _choose(state, jobs, choice, state.num_devices, wishes)
    return assign(state, jobs, choice)


def refill(state: State, jobs: Jobs) -> tuple[State, Actions]:
    """Give free devices to waiting jobs without touching those that run."""
    waiting = np.flatnonzero(jobs.rows["phase"] == WAITING)
    in_use = (state.holders[:, 0] >= 0) & state.is_up
    free = state.num_devices - np.bincount(state.device_kind[in_use], minlength=state.num_kinds)
    if not len(waiting) or not free.any():
        return state, NOTHING
    runs = jobs.rows["phase"] == RUNNING
    choice = Choice(
        kind=np.where(runs, jobs.rows["kind"], -1),
        partner=np.where(runs, rows_of(jobs, jobs.rows["partner"]), -1),
    )
    _choose(state, jobs, choice, free, wishes_of(state, jobs, waiting))
    return assign(state, jobs, choice)


def _depends_on_time(policy: str) -> bool:
    """Whether a policy looks at what the jobs did since the last answer."""
    return policy.split("-agnostic")[0] in {
        "finish-time-fairness", "ftf", "makespan", "min-cost-slo", "shortest-job-first", "allox",
    }  # fmt: skip


def _clip(state: State, jobs: Jobs) -> None:
    """Debts that could not be paid for long are not paid all at once."""
    most_s = 2.0 * state.rules.patience_rounds * state.rules.round_s
    np.clip(jobs.credit_s, -most_s, most_s, out=jobs.credit_s)
    jobs.rows["pair_credit_s"] = np.clip(jobs.rows["pair_credit_s"], -most_s, most_s)
    if state.pair_plan is not None:
        np.clip(state.pair_plan.credit_s, -most_s, most_s, out=state.pair_plan.credit_s)


class Wishes(NamedTuple):
    """What jobs and pairs want."""

    order: Counts
    """The most urgent first; numbered as `kernel.choose` wants them."""
    is_reserved: NDArray[np.bool_]
    """``[job]``: goes before all."""
    pairs: Counts
    """Profile, profile and kind of the wishes of pairs."""


def wishes_of(state: State, jobs: Jobs, which: Counts) -> Wishes:
    """The wishes of some jobs, by row."""
    some = jobs.taken(which)
    urgency = _urgency(state, some)
    is_reserved = np.zeros(len(jobs.rows), dtype=bool)
    is_reserved[which] = _is_reserved(state, some)
    pairs, pair_urgency = _pair_wishes(state)
    wishes = (which[:, None] * state.num_kinds + np.arange(state.num_kinds)).reshape(-1)
    able = (some.steps_per_s > 0.0).reshape(-1)
    keys = np.concatenate([urgency.reshape(-1)[able], pair_urgency])
    last = len(jobs.rows) * state.num_kinds
    names = np.concatenate([wishes[able], last + np.arange(len(pairs))])
    return Wishes(names[np.argsort(-keys, kind="stable")], is_reserved, pairs)


def _is_reserved(state: State, jobs: Jobs) -> NDArray[np.bool_]:
    most_s = state.rules.patience_rounds * state.rules.round_s
    return np.asarray(((jobs.credit_s > most_s) & (jobs.shares > 0.0)).any(axis=1))


def _urgency(state: State, jobs: Jobs) -> FloatArray:
    """``[job, kind]``: rounds that a job is owed there, and what goes before or after all debts."""
    rules, rows = state.rules, jobs.rows
    is_owed = jobs.shares > 0.0
    here = (rows["kind"][:, None] == np.arange(state.num_kinds)) & (rows["partner"] < 0)[:, None]
    owed = jobs.credit_s / rules.round_s
    owed += np.where(here, rules.stickiness_rounds, 0.0)
    if rules.slack_rounds > 0.0:
        owed += rules.slack_rounds * _HALF_ROUNDS / (_HALF_ROUNDS + _rounds_left(state, jobs))
    owed = np.floor(owed * _UNITS_PER_ROUND) / _UNITS_PER_ROUND
    owed += np.where(_is_reserved(state, jobs), _FIRST, 0.0)[:, None]
    urgency = np.where(is_owed, owed, _LAST + _fill_order(jobs, here))
    if rules.min_run_s > 0.0:
        fresh = (rows["phase"] == RUNNING) & (state.time_s - rows["started_s"] < rules.min_run_s)
        urgency += np.where(here & fresh[:, None], 4.0 * _FIRST, 0.0)
    return urgency


def _rounds_left(state: State, jobs: Jobs) -> FloatArray:
    """Rounds to the end of each job on each kind."""
    left = np.maximum(jobs.rows["total_steps"] - jobs.rows["done_steps"], 0.0)
    speed = np.where(jobs.steps_per_s > 0.0, jobs.steps_per_s, 1.0)
    return np.asarray(left[:, None] / (speed * state.rules.round_s))


def _fill_order(jobs: Jobs, here: NDArray[np.bool_]) -> FloatArray:
    """Among wishes that nobody owes: where a job is fast, and where it runs already."""
    best = np.maximum(jobs.steps_per_s.max(axis=1, initial=0.0), 1e-300)
    relative = jobs.steps_per_s / best[:, None]
    return np.asarray(np.round(relative, 6) + np.where(here, 0.5, 0.0))


def _pair_wishes(state: State) -> tuple[Counts, FloatArray]:
    """One wish per device that a pair of profiles is owed."""
    plan = state.pair_plan
    none = np.zeros((0, 3), dtype=np.int64)
    if plan is None:
        return none, np.zeros(0)
    a, b, kind = np.nonzero(plan.amount)
    if not len(a):
        return none, np.zeros(0)
    owed = plan.credit_s[a, b, kind] / state.rules.round_s
    copies = np.ceil(plan.amount[a, b, kind]).astype(np.int64) + 1
    which = np.repeat(np.arange(len(a)), copies)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(copies) - copies, copies)
    urgency = np.floor((owed[which] - nth + 1.0) * _UNITS_PER_ROUND) / _UNITS_PER_ROUND
    keep = urgency > 0.0
    return np.stack([a, b, kind], axis=1)[which][keep], urgency[keep]


def _choose(state: State, jobs: Jobs, choice: Choice, free: Counts, wishes: Wishes) -> None:
    from hocket.fleet.rounds.kernel import choose

    queue, queue_at = _queues(state, jobs)
    choose(jobs, wishes.order, wishes.is_reserved, wishes.pairs, queue, queue_at, free, choice)


def _queues(state: State, jobs: Jobs) -> tuple[Counts, Counts]:
    """Jobs of each profile that want to share, the neediest first."""
    if state.pair_plan is None:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    wants = np.flatnonzero(jobs.rows["phase"] <= RUNNING)
    stays = (jobs.rows["partner"][wants] >= 0) * state.rules.stickiness_rounds
    need = np.floor(
        (jobs.rows["pair_credit_s"][wants] / state.rules.round_s + stays) * _UNITS_PER_ROUND
    )
    queue = wants[np.lexsort((-need, jobs.rows["profile"][wants]))]
    num_profiles = len(state.pair_plan.amount)
    ends = np.searchsorted(jobs.rows["profile"][queue], np.arange(num_profiles + 1))
    return queue, np.stack([ends[:-1], ends[1:]], axis=1)
