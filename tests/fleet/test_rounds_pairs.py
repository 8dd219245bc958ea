"""Two jobs on one device: where that pays, beside jobs alone, over servers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hocket.fleet.rounds import (
    AddDevices,
    Cancel,
    Finish,
    FleetDevice,
    FleetState,
    Job,
    PairTable,
    Progress,
    RemoveDevices,
    Rules,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import WAITING

from .round_fleets import NO_SLACK, fleet, job, submit


def test_two_on_a_device_where_that_pays() -> None:
    devices = (FleetDevice(name="d", device_type="fast"),)
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(("fast",), devices, NO_SLACK, pair_table=table)
    jobs = [Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e6, profile=0) for n in (0, 1)]
    state = submit(state, *jobs)
    assert sorted(state.holders[0]) == [0, 1]
    assert state.jobs.rows["rate"].tolist() == [1.8, 1.8]
    state, _ = step(state, Finish(time_s=100.0, numbers=(0,)))
    assert state.holders[0].tolist() == [1, -1]
    assert state.jobs.rows["rate"][1] == 2.0, "alone again, at full speed"


def test_pairs_stand_beside_jobs_that_run_alone() -> None:
    # Three jobs on two devices: two share one of them all the time, in turns.
    devices = tuple(FleetDevice(name=f"d{at}", device_type="fast") for at in range(2))
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(("fast",), devices, Rules(), pair_table=table)
    jobs = [
        Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e5 * (n + 1), profile=0)
        for n in range(3)
    ]
    state = submit(state, *jobs)
    for _ in range(30):
        assert (state.jobs.rows["device_type"] >= 0).all()
        assert (state.holders[:, 1] >= 0).sum() == 1
        state, _ = step(state, Tick(time_s=state.next_tick_s))


def shared_gangs(spread: tuple[float, ...]) -> FleetState:
    """Gangs of two over two servers, and one more job than fits, so that two have to share."""
    devices = tuple(
        FleetDevice(name=f"d{at}", device_type="fast", server=f"s{at // 2}") for at in range(4)
    )
    table = PairTable(steps_per_s=np.full((1, 1, 1), 6.0))
    rules = Rules(slack_rounds=0.0, stickiness_rounds=2.0, patience_rounds=3.0)
    state = new_state(("fast",), (devices[0], devices[2]), rules, pair_table=table)
    for number, speed in enumerate(spread):
        gang = Job(
            number=number,
            name="",
            steps_per_s=(8.0,),
            spread_steps_per_s=(speed,),
            gang=2,
            profile=0,
        )
        state = submit(state, gang)
        state = step(state, AddDevices(time_s=state.time_s, devices=(devices[1], devices[3])))[0]
    return state


def test_a_gang_that_needs_one_server_shares_devices_of_one_server() -> None:
    state = shared_gangs((5.0, 5.0, 0.0))
    assert state.jobs.rows["is_spread"].tolist() == [1, 1, 0]
    phases, num_idle = [], 0
    for _ in range(60):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        row = state.jobs.rows[2]
        phases.append(int(row["phase"]))
        assert row["phase"] == WAITING or not row["is_spread"]
        num_idle += int((state.holders[:, 0] < 0).sum())
        alone, _ = step(state, Cancel(time_s=state.time_s, numbers=(0, 1)))
        assert alone.jobs.rows["rate"][2] == 8.0
    assert phases.count(WAITING) < 15, "it goes first once it waited for long"
    assert num_idle < 20


def test_gangs_over_servers_are_slower_beside_each_other_too() -> None:
    state = shared_gangs((5.0, 5.0, 5.0))
    rates = set()
    for _ in range(10):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        for row in state.jobs.rows[state.jobs.rows["partner"] >= 0]:
            rates.add((bool(row["is_spread"]), float(row["rate"])))
    assert rates
    assert rates <= {(True, 6.0 * 5.0 / 8.0), (False, 6.0)}


def test_a_pair_of_gangs_that_finds_no_server_leaves_its_devices_to_others() -> None:
    devices = [
        FleetDevice(name=f"d{at}", device_type="fast", server=f"s{at // 2}") for at in range(4)
    ]
    table = PairTable(steps_per_s=np.full((2, 2, 1), 1.8))
    state = new_state(("fast",), (devices[0], devices[2]), NO_SLACK, pair_table=table)
    bound = [Job(number=n, name="", steps_per_s=(2.0,), preemptible=False) for n in (0, 1)]
    state = submit(state, *bound)
    # One device is free on either server now.
    state, _ = step(state, AddDevices(time_s=0.0, devices=(devices[1], devices[3])))
    gang = Job(number=2, name="", steps_per_s=(2.0,), spread_steps_per_s=(0.0,), gang=2, profile=0)
    small = [Job(number=n, name="", steps_per_s=(2.0,), profile=1) for n in (4, 5)]
    state = submit(state, gang, replace(gang, number=3), *small)
    for _ in range(25):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.jobs.rows["held_s"].tolist() == [9000.0, 9000.0, 0.0, 0.0, 9000.0, 9000.0]


def test_reasons_name_the_partner_and_the_server() -> None:
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(
        ("fast",), (FleetDevice(name="d", device_type="fast"),), NO_SLACK, pair_table=table
    )
    jobs = [Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e6, profile=0) for n in (0, 1)]
    assert reason(submit(state, *jobs), 1) == "runs on d beside job 0"
    bound = job(2, gang=3, slow=0.0, spread_steps_per_s=(0.0, 0.0))
    state = submit(submit(fleet(6), job(0, slow=0.0)), job(1, gang=2, slow=0.0))
    assert "on 3 devices of one server (3 of 6 fast free)" in reason(submit(state, bound), 2)
    held = job(0, gang=3, slow=0.0, preemptible=False)
    state = submit(submit(fleet(6), held), job(1, gang=4, slow=0.0))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert "on 4 devices (3 of 6 fast free)" in reason(state, 1)


def test_time_beside_another_teaches_nothing_of_time_alone() -> None:
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(
        ("fast",), (FleetDevice(name="d", device_type="fast"),), NO_SLACK, pair_table=table
    )
    jobs = [Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e6, profile=0) for n in (0, 1)]
    state = submit(state, *jobs)
    state, _ = step(state, Finish(time_s=100.0, numbers=(0,)))
    state, _ = step(state, Progress(time_s=110.0, number=1, attempt=1, done_steps=200.0))
    assert state.jobs.steps_per_s[-1, 0] == 2.0
    state, _ = step(state, Progress(time_s=210.0, number=1, attempt=1, done_steps=300.0))
    assert state.jobs.steps_per_s[-1, 0] == 1.5


def test_pairs_are_forgotten_where_there_are_no_devices() -> None:
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(
        ("fast",), (FleetDevice(name="d", device_type="fast"),), NO_SLACK, pair_table=table
    )
    jobs = [Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e6, profile=0) for n in (0, 1)]
    state, _ = step(submit(state, *jobs), RemoveDevices(time_s=1.0, names=("d",)))
    for _ in range(3):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.pair_plan is not None
    assert not state.pair_plan.amount.any()
    assert not state.pair_plan.credit_s.any()


def test_debts_of_pairs_that_nobody_wants_any_more_are_forgotten() -> None:
    devices = tuple(FleetDevice(name=f"d{at}", device_type="fast") for at in range(2))
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(("fast",), devices, Rules(), pair_table=table)
    jobs = (
        Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e6, profile=0) for n in range(3)
    )
    state = submit(state, *jobs)
    plan = state.pair_plan
    assert plan is not None
    assert plan.amount.any()
    deficit = replace(plan, credit_s=plan.credit_s + 100.0 * (plan.amount > 0.0))
    state = state.but(pair_plan=deficit)
    state, _ = step(state, Finish(time_s=state.time_s + 1.0, numbers=(0, 1)))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.pair_plan is not None
    assert not state.pair_plan.amount.any()
    assert not state.pair_plan.credit_s.any()


def test_a_pair_stays_together_when_devices_are_given_out_between_rounds() -> None:
    devices = [FleetDevice(name=f"d{at}", device_type="fast") for at in range(2)]
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(("fast",), (devices[0],), NO_SLACK, pair_table=table)
    state = submit(state, *(Job(number=n, name="", steps_per_s=(2.0,), profile=0) for n in (0, 1)))
    assert sorted(state.holders[0]) == [0, 1]
    alone = Job(number=2, name="", steps_per_s=(2.0,))
    state = submit(state, alone)
    state, actions = step(state, AddDevices(time_s=10.0, devices=(devices[1],)))
    assert [start.number for start in actions.starts] == [2]
    assert not list(actions.stops)
    assert sorted(state.holders[0]) == [0, 1]
    assert state.jobs.rows["partner"].tolist() == [1, 0, -1]
    assert state.jobs.rows["rate"].tolist() == [1.8, 1.8, 2.0]


def test_a_pair_pays_once_for_the_time_that_it_shares_a_device() -> None:
    devices = (FleetDevice(name="d", device_type="fast"),)
    table = PairTable(steps_per_s=np.full((2, 2, 1), 1.8))
    state = new_state(("fast",), devices, NO_SLACK, pair_table=table)
    state = submit(
        state, *(Job(number=n, name="", steps_per_s=(2.0,), profile=1 - n) for n in (0, 1))
    )
    assert sorted(state.holders[0]) == [0, 1]
    planned = state.pair_plan
    assert planned is not None
    assert planned.amount[0, 1, 0] == pytest.approx(1.0, abs=1e-3)
    state, _ = step(state, Progress(time_s=100.0, number=0, attempt=1, done_steps=180.0))
    assert state.pair_plan is not None
    # It was planned to share the device all the time, and did.
    assert abs(state.pair_plan.credit_s).max() < 0.2
    assert state.jobs.rows["pair_credit_s"] == pytest.approx([0.0, 0.0], abs=0.2)
