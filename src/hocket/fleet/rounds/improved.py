"""Rounds that pay deficits: each job earns its share of time, and the largest deficit goes first.

Shares earn credit in seconds on a device type, and holding devices spends it (deficit round robin:
Shreedhar and Varghese, SIGCOMM 1995). The order of jobs follows from these rules:

- A running job keeps its devices until the deficit of another job is larger by some rounds and by
  the cost of a stop. This saves preemptions.
- Within a slack, the job that ends sooner goes first, which shortens the average completion time.
  Jobs that have run much longer than they claimed to need get no such bonus.
- A job with too large a deficit goes before all others, and devices are reserved for its gang.
- Of running jobs with equal deficits, the one that did least since its last checkpoint is stopped.
- No job is moved without a gain: device types on which a job is equally fast count as one for it.
- Devices for which no job has a deficit go to the jobs that are fastest there.

Between rounds, free devices are given out at once, by shares that include the change. Credits are
compared in coarse units, so that noise of the solver decides nothing.

O(jobs x types (types + log)) per round.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.rounds.actions import NOTHING, Actions
from hocket.fleet.rounds.assign import assign, backfills, slack_rounds
from hocket.fleet.rounds.fairness import (
    has_groups,
    mark_over_quota,
    set_group_shift,
)
from hocket.fleet.rounds.rules import HALF_SLACK_ROUNDS, UNITS_PER_ROUND
from hocket.fleet.rounds.share import is_overdue, solve_shares
from hocket.fleet.rounds.state import (
    RUNNING,
    SHARE_ONLY,
    FleetState,
    Jobs,
    PairPlan,
    Rules,
    some_rows,
)
from hocket.fleet.rounds.tables import NO_PAIRS, Asked


def begin_round(state: FleetState, jobs: Jobs) -> tuple[FleetState, Actions]:
    """Run a round; ``jobs`` are writable, without ended ones, with work counted up to now."""
    if state.is_dirty or _depends_on_time(state.rules.policy):
        state = _share(state, jobs)
    if state.pair_plan is not None:
        most_s = 2.0 * state.rules.patience_rounds * state.rules.round_s
        # Deficits of pairs that could not be served for long are limited; otherwise those pairs
        # would push out all others later.
        np.clip(state.pair_plan.credit_s, -most_s, most_s, out=state.pair_plan.credit_s)
    _apply_quotas_and_groups(state, jobs)
    return assign(state, jobs, _asked(state, jobs), is_refill=False)


def refill(state: FleetState, jobs: Jobs) -> tuple[FleetState, Actions]:
    """Give free devices to waiting jobs without touching those that run."""
    from hocket.fleet.rounds.kernels.release import has_waiting_job_that_fits

    free = np.empty(state.num_types, dtype=np.int64)
    if not has_waiting_job_that_fits(jobs, state.holders, state.layout, free):
        return state, NOTHING
    if state.is_dirty:
        state = _share(state, jobs)
    _apply_quotas_and_groups(state, jobs)
    return assign(state, jobs, _asked(state, jobs), is_refill=True)


def _apply_quotas_and_groups(state: FleetState, jobs: Jobs) -> None:
    """Apply quotas, and shares of users and teams, before devices are granted."""
    mark_over_quota(state, jobs)
    if has_groups(state):
        wanting = np.flatnonzero(jobs.rows["phase"] <= RUNNING)
        set_group_shift(state, jobs, wanting, _slack_rounds(state.rules, jobs, wanting))


def _share(state: FleetState, jobs: Jobs) -> FleetState:
    """Compute new shares, unless the last ones are younger than ``min_solve_s``."""
    if backfills(state):
        # Under backfill the order of jobs decides alone; there is nothing to solve.
        jobs.rows["has_share"] = SHARE_ONLY
        return state.but(solved_s=state.time_s, is_dirty=False)
    is_due = state.time_s - state.solved_s >= state.rules.min_solve_s
    return solve_shares(state, jobs) if is_due else state


def _depends_on_time(policy: str) -> bool:
    """True if the answer of a policy changes while jobs run (remaining steps, elapsed time)."""
    return policy.split("-agnostic")[0] in {
        "finish-time-fairness", "ftf", "makespan", "min-cost-slo", "shortest-job-first",
    }  # fmt: skip


def _asked(state: FleetState, jobs: Jobs) -> Asked:
    """Pairs of profiles that are due shared devices, and queues of the jobs that may share."""
    if state.pair_plan is None:
        return NO_PAIRS
    queue, queue_at, slack = _queues(state.rules, jobs, len(state.pair_plan.amount))
    pairs, urgency = _pair_wishes(state.rules, state.pair_plan, queue_at, slack)
    return NO_PAIRS._replace(pairs=pairs, urgency=urgency, queue=queue, queue_at=queue_at)


def _pair_wishes(
    rules: Rules, plan: PairPlan, queue_at: LongArray, slack: FloatArray
) -> tuple[LongArray, FloatArray]:
    """One wish per device for each pair of profiles with a deficit.

    A pair also gets the mean slack of its two jobs, so that it competes with jobs that run alone:
    plans change too often for its own deficit to grow as large.
    """
    if not plan.amount.any():
        return NO_PAIRS.pairs, NO_PAIRS.urgency
    a, b, device_type = np.nonzero(plan.amount)
    # The share of this round is added, because it is earned while the devices are held.
    amount = plan.amount[a, b, device_type]
    deficit = plan.credit_s[a, b, device_type] / rules.round_s + amount
    # One wish more than planned, for deficits of earlier rounds.
    copies = np.ceil(amount).astype(np.int64) + 1
    which = np.repeat(np.arange(len(a)), copies)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(copies) - copies, copies)
    keep = deficit[which] - nth >= 1.0 / UNITS_PER_ROUND
    which, nth = which[keep], nth[keep]
    members = [_nth_slack(profile[which], nth, queue_at, slack) for profile in (a, b)]
    urgency = deficit[which] - nth + 0.5 * (members[0] + members[1])
    coarse = np.floor(urgency * UNITS_PER_ROUND) / UNITS_PER_ROUND
    return np.stack([a, b, device_type], axis=1)[which], coarse


def _nth_slack(
    profile: LongArray, nth: LongArray, queue_at: LongArray, slack: FloatArray
) -> FloatArray:
    """Slack of the nth job in the queue of a profile, or of the last; 0 for an empty queue."""
    first, end = queue_at[profile].T
    at = np.minimum(first + nth, end - 1)
    return np.where(end > first, np.append(slack, 0.0)[at], 0.0)


def _queues(rules: Rules, jobs: Jobs, num_profiles: int) -> tuple[LongArray, LongArray, FloatArray]:
    """Jobs of each profile that may share, the largest need first; ``[profile, 2]`` start and end
    of each queue; slack of the queued jobs."""
    wants = np.flatnonzero((jobs.rows["phase"] <= RUNNING) & (jobs.rows["pair_share"] > 0.0))
    slack = _slack_rounds(rules, jobs, wants)
    stays = (jobs.rows["partner"][wants] >= 0) * rules.stickiness_rounds
    deficit = jobs.rows["pair_credit_s"][wants] / rules.round_s
    need = np.floor((deficit + stays + slack) * UNITS_PER_ROUND)
    profile = jobs.rows["profile"][wants]
    order = np.lexsort((-need, profile))
    ends = np.searchsorted(profile[order], np.arange(num_profiles + 1))
    return wants[order], np.stack([ends[:-1], ends[1:]], axis=1), slack[order]


def _slack_rounds(rules: Rules, jobs: Jobs, some: LongArray) -> FloatArray:
    """Bonus in rounds for jobs that end soon, as for jobs that run alone."""
    rows = jobs.rows
    speeds = jobs.steps_per_s[some]
    left = np.maximum(rows["total_steps"][some] - rows["done_steps"][some], 0.0)
    best = np.maximum(speeds.max(axis=1, initial=0.0), 1e-300)
    is_late = is_overdue(rules, some_rows(rows, some), speeds)
    rounds_left = np.where(is_late, np.inf, left) / (best * rules.round_s)
    return np.asarray(slack_rounds(rules) * HALF_SLACK_ROUNDS / (HALF_SLACK_ROUNDS + rounds_left))
