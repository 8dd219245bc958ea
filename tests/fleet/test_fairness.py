"""Users and teams share first, then their jobs; quotas and priority classes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hocket.fleet.rounds import (
    Event,
    Finish,
    FleetDevice,
    FleetState,
    Job,
    Pause,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.fairness import WEEK_S, hand_on_credit, week_start_s
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import ENDED, RUNNING
from hocket.fleet.simulator import bind, simulate
from hocket.fleet.traces import Trace, read_trace
from hocket.fleet.traces.trace import write_trace_csv

HOUR_S = 3600.0


def shared(num_devices: int, users: int = 2, teams: int = 1, **rules: object) -> FleetState:
    values = {"round_s": 10.0, **rules}
    devices = tuple(FleetDevice(name=f"d{i}", device_type="v100") for i in range(num_devices))
    return new_state(("v100",), devices, Rules(**values)).but(  # type: ignore[arg-type]
        users=tuple(f"user{n}" for n in range(users)),
        user_weight=np.ones(users),
        teams=("", *(f"team{n}" for n in range(1, teams))),
        team_weight=np.ones(teams),
    )


def one(number: int, user: int, steps: float = math.inf, **more: object) -> Job:
    values = {"steps_per_s": (1.0,), "total_steps": steps, **more}
    return Job(number=number, name="", user=user, **values)  # type: ignore[arg-type]


def held_by_user(state: FleetState, until_s: float) -> tuple[FleetState, np.ndarray]:
    """Device seconds of each user; jobs end when they have done their steps."""
    device_s = np.zeros(len(state.users))
    while state.time_s < until_s:
        rows = state.jobs.rows
        running = rows[rows["phase"] == RUNNING]
        left_s = running["total_steps"] - running["done_steps"]
        ends_s = running["counted_s"] + left_s
        event: Event = Tick(time_s=min(max(state.next_tick_s, state.time_s), until_s))
        if len(ends_s) and ends_s.min() <= event.time_s:
            number = int(running["number"][ends_s.argmin()])
            event = Finish(time_s=max(float(ends_s.min()), state.time_s), numbers=(number,))
        np.add.at(device_s, running["user"], running["gang"] * (event.time_s - state.time_s))
        state, _ = step(state, event)
    return state, device_s


@pytest.mark.parametrize("policy", ["las", "las-agnostic"])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("steps", [math.inf, 9000.0, 75.0])
def test_a_user_with_100_jobs_gets_as_much_as_one_with_a_single_job(
    policy: str, num_devices: int, steps: float
) -> None:
    many = [one(number, 0, steps) for number in range(100)]
    alone = one(100, 1, 1e6)
    state = shared(num_devices, policy=policy)
    state, _ = step(state, Submit(time_s=0.0, jobs=(*many, alone)))
    _, device_s = held_by_user(state, HOUR_S)
    assert device_s.sum() == pytest.approx(num_devices * HOUR_S)
    assert device_s[0] == pytest.approx(device_s[1], rel=0.05)


def test_what_a_user_leaves_goes_to_others() -> None:
    state = shared(4)
    jobs = (*(one(number, 0) for number in range(10)), one(10, 1))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    _, device_s = held_by_user(state, HOUR_S)
    assert device_s == pytest.approx([3 * HOUR_S, HOUR_S], rel=0.02)


def test_weights_of_users_and_of_jobs_within_a_user() -> None:
    state = shared(1).but(user_weight=np.array([3.0, 1.0]))
    jobs = (one(0, 0, weight=2.0), one(1, 0, weight=1.0), one(2, 1, weight=9.0))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    state, device_s = held_by_user(state, 3 * HOUR_S)
    assert device_s[0] / device_s[1] == pytest.approx(3.0, rel=0.05)
    held_s = state.jobs.rows["held_s"]
    assert held_s[0] / held_s[1] == pytest.approx(2.0, rel=0.1)


def test_jobs_of_a_team_share_its_part_whoever_submits_them() -> None:
    state = shared(1, users=3, teams=2)
    jobs = (one(0, 0, team=1), one(1, 1, team=1), one(2, 2))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    _, device_s = held_by_user(state, HOUR_S)
    assert device_s == pytest.approx(HOUR_S * np.array([0.25, 0.25, 0.5]), rel=0.1)


def test_without_users_weights_stay_as_they_were_submitted() -> None:
    state = shared(1, users=1)
    state, _ = step(state, Submit(time_s=0.0, jobs=(one(0, 0, weight=0.1), one(1, 0, weight=0.3))))
    assert state.jobs.rows["weight"].tolist() == [0.1, 0.3]


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────


def running(state: FleetState) -> list[int]:
    rows = state.jobs.rows
    return rows["number"][rows["phase"] == RUNNING].tolist()


@pytest.mark.parametrize("policy", ["las", "fifo"])
def test_a_quota_limits_devices_at_once(policy: str) -> None:
    quota = np.array([[3.0, np.inf], [np.inf, np.inf]])
    state = shared(8, policy=policy).but(user_quota=quota)
    jobs = (one(0, 0, 50.0, gang=2), one(1, 0, gang=2), one(2, 0), one(3, 0), one(4, 1))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    assert running(state) == [0, 2, 4], "a smaller job fits beside the first"
    assert "user 'user0' is below the quota again (holds 3 of 3 devices)" in reason(state, 1)
    state, _ = step(state, Finish(time_s=50.0, numbers=(0,)))
    assert running(state) == [1, 2, 4]


def test_a_quota_of_a_team_counts_all_its_users() -> None:
    state = shared(8, users=3, teams=2).but(team_quota=np.array([[np.inf, np.inf], [2.0, np.inf]]))
    jobs = tuple(one(number, number, team=1) for number in range(3))
    state, _ = step(state, Submit(time_s=0.0, jobs=(*jobs, one(3, 0))))
    assert running(state) == [0, 1, 3]
    assert "team 'team1'" in reason(state, 2)


def test_a_job_that_the_quota_of_its_team_blocks_takes_nothing_from_that_of_its_user() -> None:
    state = shared(4, teams=3).but(
        user_quota=np.array([[1.0, np.inf], [np.inf, np.inf]]),
        team_quota=np.array([[np.inf, np.inf], [1.0, np.inf], [np.inf, np.inf]]),
    )
    state, _ = step(state, Submit(time_s=0.0, jobs=(one(0, 1, team=1),)))
    jobs = (one(1, 0, team=1), one(2, 0, team=2), one(3, 0, team=2))
    state, _ = step(state, Submit(time_s=1.0, jobs=jobs))
    assert running(state) == [0, 2]
    assert "team 'team1' is below the quota again (holds 1 of 1 devices)" in reason(state, 1)
    assert "user 'user0' is below the quota again (holds 1 of 1 devices)" in reason(state, 3)


def test_device_time_of_a_week_is_a_quota_and_the_next_week_begins_anew() -> None:
    start_s = week_start_s(10.0 * WEEK_S)
    quota = np.array([[np.inf, 500.0], [np.inf, np.inf]])
    state = replace(shared(4), time_s=start_s).but(user_quota=quota)
    jobs = (one(0, 0, gang=2), one(1, 0, gang=1))
    state, _ = step(state, Submit(time_s=start_s, jobs=jobs))
    state, _ = step(state, Finish(time_s=start_s + 100.0, numbers=(1,)))
    assert state.user_used_s.tolist() == [300.0, 0.0]
    state, _ = step(state, Submit(time_s=start_s + 100.0, jobs=(one(2, 0), one(3, 1))))
    assert running(state) == [0, 2, 3]
    state, _ = step(state, Pause(time_s=start_s + 200.0, numbers=(2,)))
    state, _ = step(state, Submit(time_s=start_s + 200.0, jobs=(one(4, 0),)))
    assert running(state) == [0, 3], "who runs goes on, and nothing new begins"
    assert "used 0.2 of 0.1 device hours this week" in reason(state, 4)
    state, _ = step(state, Tick(time_s=start_s + WEEK_S - 1.0))
    assert running(state) == [0, 3], "weeks begin on Monday, as those of hocket fleet usage"
    state, _ = step(state, Tick(time_s=start_s + WEEK_S + 20.0))
    assert running(state) == [0, 3, 4]


# ── priorities ───────────────────────────────────────────────────────────────────────────────────


def test_a_higher_priority_takes_the_devices_of_jobs_that_can_be_stopped() -> None:
    state = shared(2)
    state, _ = step(state, Submit(time_s=0.0, jobs=(one(0, 0), one(1, 0, preemptible=False))))
    state, _ = step(state, Submit(time_s=1.0, jobs=(one(2, 1, priority=1), one(3, 1, priority=2))))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert running(state) == [1, 3]
    for _ in range(300):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert running(state) == [1, 3]


def test_the_line_is_by_priority_then_by_arrival() -> None:
    state = shared(1, policy="fifo")
    jobs = (one(0, 0, 10.0), one(1, 0, 10.0), one(2, 0, 10.0, priority=1), one(3, 0, priority=-1))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    order = []
    for _ in range(4):
        order += running(state)
        state, _ = step(state, Finish(time_s=state.time_s + 10.0, numbers=(order[-1],)))
    assert order == [2, 0, 1, 3]


def test_traces_with_users_are_simulated_by_user_first(tmp_path: Path) -> None:
    """One user's 40 jobs and another's single job, of an hour each, on two devices."""
    rows = [f"{n},0,3600,{'many' if n < 40 else 'one'}" for n in range(41)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["name,arrival_s,duration_s,user", *rows]))
    trace = read_trace(path)
    write_trace_csv(trace, tmp_path / "again.csv")
    assert read_trace(tmp_path / "again.csv").users == trace.users == ("many",) * 40 + ("one",)
    devices = tuple(FleetDevice(name=f"d{i}", device_type="v100") for i in range(2))

    def end_s(known: Trace) -> float:
        run = simulate(bind(known, ("v100",), None), devices, Rules(round_s=60.0))
        return float(run.end_s[40])

    assert end_s(trace) <= 1.2 * HOUR_S
    assert end_s(replace(trace, users=())) > 5.0 * HOUR_S


def test_a_deficit_is_handed_on_by_device_time() -> None:
    state = shared(8)
    jobs = (one(0, 1, gang=2), one(1, 1), one(2, 1, gang=2), one(3, 0))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    credit_s = np.array([[90.0], [5.0], [0.0], [7.0]])
    rows = state.jobs.rows.copy()
    rows["phase"][0] = ENDED
    given = state.jobs._replace(rows=rows, credit_s=credit_s)
    hand_on_credit(state, given, np.array([0]))
    # 180 device seconds over three devices of the others of this user.
    assert credit_s[:, 0].tolist() == [0.0, 65.0, 60.0, 7.0]


def test_of_a_job_that_runs_over_a_week_only_the_time_in_the_new_one_counts() -> None:
    start_s = week_start_s(10.0 * WEEK_S) - 100.0
    quota = np.array([[np.inf, 1e9], [np.inf, np.inf]])
    state = replace(shared(4), time_s=start_s).but(user_quota=quota)
    state, _ = step(state, Submit(time_s=start_s, jobs=(one(0, 0, gang=2),)))
    state, _ = step(state, Submit(time_s=start_s + 130.0, jobs=(one(1, 1),)))
    assert state.user_used_s.tolist() == [60.0, 0.0]
