"""Jobs that say to need less than they do gain nothing by it, under any policy that listens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies import find_policy
from hocket.fleet.rounds import Finish, Progress, Rules, Tick, step

from .round_fleets import fleet, held_s, job, submit

ROUND_S = 360.0
NEVER = 400.0
"""Rounds that the job needs which says what it likes: more than anybody looks."""
NEXT_TO_NOTHING = 1e-9
UNTIL_CAUGHT = 3
"""A job is believed for one round beyond twice its claim, and rounds begin at their time."""


def rounds_held(policy: str, claimed_rounds: float, rounds: float, num_honest: int) -> tuple:
    """Rounds that a job held the only device before all others had ended, and rounds until then."""
    jobs = [job(0, fast=1.0, slow=0.0, steps=claimed_rounds * ROUND_S)]
    for number in range(1, num_honest + 1):
        steps = rounds * (1.0 + 0.01 * number) * ROUND_S
        jobs.append(job(number, fast=1.0, slow=0.0, steps=steps))
    jobs = [replace(one, deadline_s=1.5 * num_honest * rounds * ROUND_S) for one in jobs]
    state = submit(fleet(1, rules=Rules(policy=policy)), *jobs)
    held = num_rounds = 0
    while len(state.names) > 1 and num_rounds < 200:
        held += int(state.holders[0, 0] == 0)
        num_rounds += 1
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        rows = state.jobs.rows
        is_done = (rows["done_steps"] >= rows["total_steps"]) & (rows["number"] > 0)
        if len(ended := rows["number"][is_done & (rows["phase"] < 3)]):
            state, _ = step(state, Finish(time_s=state.time_s, numbers=tuple(ended.tolist())))
    return held, num_rounds


@pytest.mark.parametrize("num_honest", [1, 3])
@pytest.mark.parametrize(
    "policy", ["las", "shortest-job-first", "makespan", "min-cost-slo", "max-throughput"]
)
def test_a_job_gets_no_more_time_by_claiming_next_to_nothing(policy: str, num_honest: int) -> None:
    by_lying, _ = rounds_held(policy, NEXT_TO_NOTHING, 20.0, num_honest)
    by_the_truth, _ = rounds_held(policy, NEVER, 20.0, num_honest)
    assert by_lying <= by_the_truth + UNTIL_CAUGHT


@pytest.mark.parametrize("policy", ["finish-time-fairness", "ftf-agnostic"])
def test_no_claim_gives_more_than_an_equal_part_where_parts_are_the_measure(policy: str) -> None:
    for num_honest in (1, 3):
        held, num_rounds = rounds_held(policy, NEXT_TO_NOTHING, 60.0, num_honest)
        assert held <= num_rounds / (num_honest + 1) + UNTIL_CAUGHT


@pytest.mark.parametrize("policy", ["las", "shortest-job-first", "finish-time-fairness"])
def test_a_job_that_claims_next_to_nothing_cannot_hold_a_device(policy: str) -> None:
    """It delays another by what that one needs itself at most, whatever the policy looks at."""
    rounds_needed = 20
    honest = job(1, slow=0.0, steps=rounds_needed * 360.0)
    state = submit(fleet(1, rules=Rules(policy=policy)), job(0, slow=0.0, steps=1e-6), honest)
    held = held_s(state, 4 * rounds_needed)
    assert held[1] >= rounds_needed * 360.0


def test_a_job_that_said_to_end_soon_and_does_not_loses_its_slack() -> None:
    state = fleet(1, rules=Rules())
    liar, honest = job(0, slow=0.0, steps=1.0), job(1, slow=0.0)
    state = submit(state, liar, honest)
    assert state.holders[0, 0] == 0
    rounds = 0
    while state.holders[0, 0] == 0 and rounds < 200:
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        done = Progress(time_s=state.time_s, number=0, attempt=1, done_steps=0.0)
        state, _ = step(state, done)
        rounds += 1
    assert rounds <= 12, "as one that said nothing"


def snapshot(remaining: list[float], is_overdue: list[bool], num_devices: int) -> ClusterSnapshot:
    count = len(remaining)
    return ClusterSnapshot(
        device_types=("fast",),
        num_devices=np.array([num_devices]),
        price_per_hour=np.ones(1),
        ids=tuple(map(str, range(count))),
        steps_per_s=np.ones((count, 1)),
        gang=np.ones(count, dtype=np.int64),
        weight=np.ones(count),
        remaining_steps=np.array(remaining),
        elapsed_s=np.zeros(count),
        deadline_s=np.full(count, 1000.0),
        isolated_s=np.zeros(count),
        arrival=np.arange(count),
        team_of=np.zeros(count, dtype=np.int64),
        team_weight=np.ones(1),
        is_overdue=np.array(is_overdue),
    )


@pytest.mark.parametrize("policy", ["shortest-job-first"])
def test_who_should_have_ended_long_ago_comes_last_and_who_had_least_first(policy: str) -> None:
    late = [True, True, False, False]
    for num_devices, runs in ((1, [3]), (2, [2, 3]), (3, [1, 2, 3])):
        found = find_policy(policy)(snapshot([20.0, 10.0, 900.0, 800.0], late, num_devices), None)
        assert np.flatnonzero(found.shares[:, 0]).tolist() == runs
    believed = find_policy(policy)(snapshot([20.0, 10.0, 900.0, 800.0], [False] * 4, 1), None)
    assert np.flatnonzero(believed.shares[:, 0]).tolist() == [1]


def test_a_deadline_of_a_job_that_should_have_ended_long_ago_is_dropped_and_named() -> None:
    found = find_policy("min-cost-slo")(snapshot([900.0, 900.0], [True, False], 1), None)
    assert found.notes["deadlines dropped"] == "0"
    assert found.shares[1, 0] == pytest.approx(0.9)


def test_a_job_that_is_overdue_counts_as_long_as_the_longest_that_is_not() -> None:
    finish_time_fairness = find_policy("finish-time-fairness")
    known = snapshot_of_two(remaining=(500.0, 4000.0))
    overdue = replace(snapshot_of_two(remaining=(1.0, 4000.0)), is_overdue=np.array([True, False]))
    # Twice as fast as the other, it would do twice as many steps in the time of the longest.
    believed = snapshot_of_two(remaining=(8000.0, 4000.0))
    assert finish_time_fairness(overdue, None).shares == pytest.approx(
        finish_time_fairness(believed, None).shares, abs=1e-6
    )
    assert finish_time_fairness(known, None).shares != pytest.approx(
        finish_time_fairness(believed, None).shares, abs=1e-2
    )


def snapshot_of_two(remaining: tuple[float, float]) -> ClusterSnapshot:
    none = np.zeros(2, dtype=np.int64)
    return ClusterSnapshot(
        device_types=("fast",),
        num_devices=np.array([1]),
        price_per_hour=np.ones(1),
        ids=("a", "b"),
        steps_per_s=np.array([[2.0], [1.0]]),
        gang=np.ones(2, dtype=np.int64),
        weight=np.ones(2),
        remaining_steps=np.array(remaining),
        elapsed_s=np.array([2000.0, 100.0]),
        deadline_s=np.full(2, np.inf),
        isolated_s=np.array([500.0, 10.0]),
        arrival=np.arange(2),
        team_of=none,
        team_weight=np.ones(1),
    )
