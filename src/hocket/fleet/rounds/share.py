"""The policy's answer for the jobs of a state, written into their rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot, Pairs
from hocket.fleet.policies import find_policy
from hocket.fleet.policies.agnostic import all_fastest
from hocket.fleet.policies.lists import fifo_as_gavel
from hocket.fleet.policies.normalise import isolated_steps_per_s
from hocket.fleet.rounds.assign import runs_in_arrival_order
from hocket.fleet.rounds.fairness import set_weights
from hocket.fleet.rounds.rules import OVERDUE_FACTOR
from hocket.fleet.rounds.state import (
    MAY_FILL,
    RUNNING,
    SHARE_ONLY,
    FleetState,
    Jobs,
    PairPlan,
    Rows,
    Rules,
    some_rows,
)

_ISOLATING = ("finish-time-fairness", "ftf-agnostic")
"""Policies that look at how far a job would be on its own part of the cluster."""
_GRID = 1e6
"""Shares are rounded to a millionth, so that noise of a solver decides nothing."""


def solve_shares(state: FleetState, jobs: Jobs) -> FleetState:
    """Compute shares by the policy; ``jobs`` are changed in place."""
    if state.rules.policy in _ISOLATING:
        _advance_alone(jobs)
    state = state.but(solved_s=state.time_s, is_dirty=False)
    if state.rules.mechanism != "gavel":
        set_weights(state, jobs)
    has_devices = bool(state.layout.num_devices.any())
    wanting = np.flatnonzero(jobs.rows["phase"] <= RUNNING)
    last_shares = _last_shares(state, jobs, wanting)
    # Jobs that do not run or wait have no share.
    jobs.shares[:] = 0.0
    jobs.rows["pair_share"] = 0.0
    # Under first come, first served, devices stay idle rather than let a job overtake another.
    is_fifo = state.rules.policy.startswith("fifo")
    jobs.rows["has_share"] = SHARE_ONLY if is_fifo else MAY_FILL
    if not len(wanting) or not has_devices:
        return state.but(pair_plan=_no_pairs(state))
    seen = consolidated_steps_per_s(state, jobs, wanting)
    snapshot = to_snapshot(state, seen, some_rows(jobs.rows, wanting), last_shares)
    answer = _policy(state)(snapshot, state.warm)
    jobs.shares[wanting] = _coarse(answer.shares)
    if state.rules.policy in _ISOLATING:
        seen_snapshot = all_fastest(snapshot) if state.rules.policy == "ftf-agnostic" else snapshot
        jobs.rows["isolated_rate"][wanting] = isolated_steps_per_s(seen_snapshot)
    return state.but(
        warm=answer.warm,
        notes=answer.notes,
        pair_plan=_pair_plan(state, jobs, wanting, answer),
    )


def _last_shares(state: FleetState, jobs: Jobs, wanting: LongArray) -> FloatArray | None:
    """Present device types of the jobs, for policies that leave them there; improved rounds weigh
    moves themselves."""
    if state.rules.mechanism == "gavel":
        return jobs.shares[wanting]
    if not runs_in_arrival_order(state):
        return None
    on = jobs.rows["device_type"][wanting][:, None] == np.arange(state.num_types)
    return np.asarray(on, dtype=float)


def _policy(state: FleetState) -> Callable[[ClusterSnapshot, Warm | None], Allocation]:
    """The policy of the rules; Gavel's rounds have their own FIFO."""
    rules = state.rules
    is_fifo_of_gavel = rules.mechanism == "gavel" and rules.policy == "fifo"
    return fifo_as_gavel if is_fifo_of_gavel else find_policy(rules.policy)


def _coarse(shares: FloatArray) -> FloatArray:
    return np.asarray(np.rint(shares * _GRID) / _GRID)


def consolidated_steps_per_s(state: FleetState, jobs: Jobs, wanting: LongArray) -> FloatArray:
    """Throughputs of some jobs, each gang on as few servers as possible; 0 where it cannot run."""
    gang, largest = jobs.rows["gang"][wanting], state.layout.largest_server
    if gang.max() <= largest.min():
        return jobs.steps_per_s[wanting]
    is_spread = gang[:, None] > largest
    return np.where(is_spread, jobs.spread_steps_per_s[wanting], jobs.steps_per_s[wanting])


def _advance_alone(jobs: Jobs) -> None:
    """Add the time that the work since the last answer would have taken on an equal part of the
    cluster."""
    rows = jobs.rows
    rate = rows["isolated_rate"]
    done = np.maximum(rows["done_steps"] - rows["isolated_steps"], 0.0)
    rows["isolated_s"] += np.where(rate > 0.0, done / np.where(rate > 0.0, rate, 1.0), 0.0)
    rows["isolated_steps"] = rows["done_steps"]


def to_snapshot(
    state: FleetState, steps_per_s: FloatArray, rows: Rows, last_shares: FloatArray | None = None
) -> ClusterSnapshot:
    """Build the input of the policy."""
    pairs = None
    if state.pair_table is not None:
        pairs = Pairs(
            profile_of=np.ascontiguousarray(rows["profile"]),
            steps_per_s=state.pair_table.steps_per_s,
        )
    is_late = _are_late(state.rules, rows, steps_per_s)
    had_steps = rows["held_s"] * steps_per_s.max(axis=1, initial=0.0)
    # Gavel's rounds trust all claims. In the improved rounds, a job that should have ended long ago
    # counts as half done: it is assumed to need as much again as it has had.
    left = np.asarray(rows["total_steps"] - rows["done_steps"])
    return ClusterSnapshot(
        device_types=state.device_types,
        num_devices=state.num_devices,
        price_per_hour=state.price_per_hour,
        ids=tuple(map(str, rows["number"].tolist())),
        steps_per_s=steps_per_s,
        gang=np.ascontiguousarray(rows["gang"]),
        weight=np.ascontiguousarray(rows["weight"]),
        remaining_steps=np.where(is_late, np.maximum(left, had_steps), left),
        elapsed_s=state.time_s - rows["submitted_s"],
        deadline_s=rows["deadline_s"] - state.time_s,
        isolated_s=np.where(is_late, _alone_s(rows, had_steps), rows["isolated_s"]),
        arrival=np.arange(len(rows)),
        team_of=np.ascontiguousarray(rows["team"]),
        teams=state.teams,
        team_weight=state.team_weight,
        pairs=pairs,
        last_shares=last_shares,
        is_overdue=is_late if is_late.any() else None,
    )


def _are_late(rules: Rules, rows: Rows, steps_per_s: FloatArray) -> BoolArray:
    if rules.mechanism == "gavel":
        return np.zeros(len(rows), dtype=bool)
    return is_overdue(rules, rows, steps_per_s)


def _alone_s(rows: Rows, steps: FloatArray) -> FloatArray:
    """Seconds that some steps would have taken on an equal part of the cluster."""
    rate = rows["isolated_rate"]
    alone_s = np.divide(steps, rate, out=np.zeros(len(rows)), where=rate > 0.0)
    return np.asarray(np.maximum(alone_s, rows["isolated_s"]))


def is_overdue(rules: Rules, rows: Rows, steps_per_s: FloatArray) -> BoolArray:
    """True for jobs that have run much longer than they claimed to need on their slowest device
    type."""
    slowest = np.where(steps_per_s > 0.0, steps_per_s, np.inf).min(axis=1, initial=np.inf)
    # A job that can run nowhere has had no time, so any speed will do.
    slowest = np.where(np.isinf(slowest), 1.0, slowest)
    most_s = OVERDUE_FACTOR * rows["total_steps"] / slowest + rules.round_s
    worked_s = rows["held_s"] - rows["attempt"] * rules.restart_s
    return np.asarray(worked_s > most_s)


def _no_pairs(state: FleetState) -> PairPlan | None:
    """An empty pair plan."""
    if state.pair_plan is None:
        return None
    nothing = np.zeros(state.pair_plan.amount.shape)
    return PairPlan(amount=nothing, credit_s=nothing.copy())


def _pair_plan(
    state: FleetState, jobs: Jobs, wanting: LongArray, answer: Allocation
) -> PairPlan | None:
    """Sum the pair time of an answer by profile; deficits of pairs that are no longer planned are
    dropped."""
    plan = state.pair_plan
    if plan is None:
        return None
    amount = np.zeros(plan.amount.shape)
    shared = answer.shared
    if shared is not None and len(shared.amount):
        low = np.minimum(shared.profile_a, shared.profile_b)
        high = np.maximum(shared.profile_a, shared.profile_b)
        np.add.at(amount, (low, high, shared.device_type), _coarse(shared.amount))
    if answer.paired is not None:
        time = np.zeros(len(wanting))
        np.add.at(time, answer.paired.job, answer.paired.amount)
        jobs.rows["pair_share"][wanting] = _coarse(time)
    return PairPlan(amount=amount, credit_s=np.where(amount > 0.0, plan.credit_s, 0.0))
