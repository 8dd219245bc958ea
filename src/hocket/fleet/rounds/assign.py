"""Run the compiled part of a round: from ranked wishes to devices, rows and actions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.rules import MIN_ROUNDS_TO_RESERVE
from hocket.fleet.rounds.state import RUNNING, FleetState, Jobs, Rules
from hocket.fleet.rounds.tables import Asked, RoundParameters, Speeds, new_round


def assign(
    state: FleetState, jobs: Jobs, asked: Asked, *, is_refill: bool
) -> tuple[FleetState, Actions]:
    """Give devices to the most urgent jobs; ``jobs`` are changed in place and belong to the new
    state."""
    from hocket.fleet.rounds.kernels.place import run_round

    parameters = _parameters(state.rules, is_refill, runs_in_arrival_order(state), backfills(state))
    parameters = parameters._replace(
        reserve_after_s=reserve_after_s(state, jobs), next_round_s=float(state.next_tick_s)
    )
    held = rows_of(jobs, state.holders)
    made = new_round(state.time_s, jobs, asked, parameters, speeds_of(state), state.layout, held)
    run_round(made)
    # Under backfill no shares are solved for: a running job has all of its time where it runs.
    if parameters.backfills:
        running = np.flatnonzero(jobs.rows["phase"] == RUNNING)
        jobs.shares[:] = 0.0
        jobs.shares[running, jobs.rows["device_type"][running]] = 1.0
    num_stopped, num_started, num_devices = made.sizes.tolist()
    stopped, started = made.stopped[:, :num_stopped], made.started[:, :num_started]
    actions = Actions(
        stopped=stopped[0],
        stopped_attempt=stopped[1],
        stopped_reason=stopped[2],
        started=started[0],
        started_attempt=started[1],
        partner=started[2],
        device_ptr=made.device_ptr[: num_started + 1],
        device=made.device[:num_devices],
        device_names=state.device_names,
    )
    return state.but(jobs=jobs, holders=made.holders), actions


@lru_cache(maxsize=64)
def _parameters(
    rules: Rules, is_refill: bool, runs_in_arrival_order: bool, backfills: bool
) -> RoundParameters:
    # Converted to float: a rule given as an integer would compile the kernels a second time.
    round_s, patience_s = float(rules.round_s), float(rules.patience_rounds * rules.round_s)
    return RoundParameters(
        round_s=round_s,
        stickiness_rounds=float(rules.stickiness_rounds),
        slack_rounds=slack_rounds(rules),
        patience_s=patience_s,
        max_deficit_s=2.0 * patience_s,
        restart_s=float(rules.restart_s),
        runs_in_arrival_order=runs_in_arrival_order,
        backfills=backfills,
        reserve_after_s=np.inf,
        next_round_s=np.inf,
        # Device types that are equally fast may differ in price.
        keeps_equal=not rules.policy.startswith("min-cost"),
        min_turn_s=float(rules.stickiness_rounds * round_s),
        is_refill=is_refill,
        by_share=rules.mechanism == "gavel",
    )


def slack_rounds(rules: Rules) -> float:
    """Slack of short jobs in rounds; 0 for policies about the last end or deadlines."""
    is_about_ends = rules.policy.startswith("makespan") or rules.policy == "min-cost-slo"
    return 0.0 if is_about_ends else float(rules.slack_rounds)


def runs_in_arrival_order(state: FleetState) -> bool:
    """True if jobs run to their end in order of arrival (improved FIFO without sharing)."""
    is_improved = state.rules.mechanism != "gavel" and state.pair_table is None
    return is_improved and state.rules.policy.startswith("fifo")


def backfills(state: FleetState) -> bool:
    """True under first come, first served with conservative backfill."""
    return state.rules.policy == "fifo" and runs_in_arrival_order(state)


def reserve_after_s(state: FleetState, jobs: Jobs) -> float:
    """Wait in seconds after which devices are reserved for a gang: as set in the rules, else two
    rounds or the median job length, whichever is larger."""
    rules, rows = state.rules, jobs.rows
    # If all jobs can be stopped, deficits decide and nothing is reserved; existing reservations are
    # kept.
    concerns = (rows["preemptible"] <= 0).any() or (rows["reserved_s"] > 0.0).any()
    if rules.mechanism == "gavel" or not concerns:
        return np.inf
    if rules.reserve_after_s is not None:
        return float(rules.reserve_after_s)
    least_s = MIN_ROUNDS_TO_RESERVE * float(rules.round_s)
    known = (rows["phase"] <= RUNNING) & np.isfinite(rows["total_steps"])
    best = jobs.steps_per_s.max(axis=1, initial=0.0)
    known &= best > 0.0
    if not known.any():
        return least_s
    return max(least_s, float(np.median(rows["total_steps"][known] / best[known])))


def speeds_of(state: FleetState) -> Speeds:
    """Tables that rates of running jobs depend on, besides the jobs themselves."""
    whole_s = float(state.rules.round_s) if state.rules.mechanism == "gavel" else 0.0
    pairs = state.pair_table
    beside = np.zeros((0, 0, state.num_types)) if pairs is None else pairs.steps_per_s
    return Speeds(beside=beside, whole_s=whole_s)


def rows_of(jobs: Jobs, numbers: LongArray) -> LongArray:
    """Look up rows of jobs by number; -1 for a number that is not there."""
    if not len(jobs.rows):
        return np.full(numbers.shape, -1)
    at = np.minimum(np.searchsorted(jobs.rows["number"], numbers), len(jobs.rows) - 1)
    return np.where(jobs.rows["number"][at] == numbers, at, -1)
