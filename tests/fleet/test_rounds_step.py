"""Single steps, and runs of rounds whose outcome can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from hocket.base.errors import UsageError
from hocket.fleet.rounds import (
    AddDevices,
    Drain,
    Fail,
    FleetDevice,
    Pause,
    Progress,
    RemoveDevices,
    Resume,
    Rules,
    Submit,
    Tick,
    step,
)
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import WAITING

from .round_fleets import fleet, held_s, job, submit
from .stored_states import pack, unpack


def test_a_job_starts_as_soon_as_a_device_is_free() -> None:
    state = submit(fleet(2), job(0))
    state, actions = step(state, Submit(time_s=10.0, jobs=(job(1),)))
    assert [(start.number, start.devices) for start in actions.starts] == [(1, ("fast1",))]


def test_gavel_waits_for_the_next_allocation() -> None:
    state = submit(fleet(2, rules=Rules(mechanism="gavel")), job(0))
    started = []
    state, actions = step(state, Submit(time_s=10.0, jobs=(job(1),)))
    while state.time_s < 4000.0:
        started += [(state.time_s, start.number) for start in actions.starts if start.number == 1]
        state, actions = step(state, Tick(time_s=state.next_tick_s))
    assert started == [(2160.0, 1)], "the first round that begins 1920 s after the last allocation"


def test_equal_jobs_get_equal_time() -> None:
    state = submit(fleet(3), *(job(number) for number in range(7)))
    times = held_s(state, 70)
    assert np.ptp(times) <= 2 * 360.0
    assert times.sum() == pytest.approx(3 * 70 * 360.0)


def test_time_held_follows_the_shares() -> None:
    state = submit(fleet(2, 3), *(job(i, fast=2.0 + i) for i in range(8)))
    for _ in range(200):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    deficit = state.jobs.rows["target_s"]
    assert state.jobs.rows["held_s"] == pytest.approx(deficit, abs=5 * 360.0)


def test_weights_are_kept() -> None:
    state = submit(
        fleet(2), *(job(number, slow=0.0, weight=3.0 if number < 2 else 1.0) for number in range(4))
    )
    times = held_s(state, 120)
    assert times[:2].sum() / times[2:].sum() == pytest.approx(3.0, rel=0.05)


def test_a_gang_is_not_starved_by_small_jobs() -> None:
    rules = Rules(patience_rounds=5.0)
    state = submit(
        fleet(4, rules=rules), *(job(number, slow=0.0, steps=1e4) for number in range(8))
    )
    state = submit(state, job(8, slow=0.0, gang=4))
    waited = longest = 0
    for round_number in range(200):
        fresh = job(9 + round_number, slow=0.0, steps=1e4)
        state = step(state, Submit(time_s=state.time_s + 1.0, jobs=(fresh,)))[0]
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        runs = state.jobs.rows["device_type"][state.row_of(8)] >= 0
        waited = 0 if runs else waited + 1
        longest = max(longest, waited)
    share = float(state.jobs.shares[state.row_of(8)].sum())
    assert longest <= (rules.patience_rounds + 2) / share


def test_short_jobs_first_within_the_slack() -> None:
    long, short = job(0, slow=0.0, steps=1e7), job(1, slow=0.0, steps=3000.0)
    for slack, runs in ((0.0, 0), (150.0, 1)):
        state = submit(fleet(1, rules=Rules(slack_rounds=slack)), long, short)
        assert state.holders[0, 0] == runs


def test_new_jobs_start_with_a_real_share() -> None:
    state = submit(fleet(2), job(0))
    state = step(state, Submit(time_s=10.0, jobs=(job(1),)))[0]
    assert state.solved_s == 10.0
    assert state.jobs.shares[1].sum() == pytest.approx(1.0)
    state = step(state, Submit(time_s=20.0, jobs=(job(2, slow=0.0),)))[0]
    assert state.solved_s == 10.0, "nothing can start, so nothing is solved before the next round"
    rare = submit(fleet(2, rules=Rules(min_solve_s=100.0)), job(0))
    rare, actions = step(rare, Submit(time_s=10.0, jobs=(job(1),)))
    assert rare.solved_s == 0.0
    assert [start.number for start in actions.starts] == [1], "it starts all the same"


def test_a_gang_over_two_servers_runs_at_the_spread_rate() -> None:
    apart = job(1, fast=8.0, gang=2, spread_steps_per_s=(5.0, 0.0))
    state = submit(fleet(6), *(job(0, gang=3), apart))
    rate = state.jobs.rows["rate"]
    assert state.devices_of(1) == ("fast4", "fast5")
    assert rate[1] == 8.0, "one server has room for both"
    state = submit(fleet(6), job(0, gang=3), job(1, gang=1))
    state = step(state, Submit(time_s=1.0, jobs=(replace(apart, number=2),)))[0]
    servers = {int(name[4:]) // 4 for name in state.devices_of(2)}
    assert state.jobs.rows["rate"][2] == (8.0 if len(servers) == 1 else 5.0)
    large = submit(fleet(6), job(0, gang=6, fast=9.0, spread_steps_per_s=(5.0, 0.0)))
    assert large.jobs.rows["rate"][0] == 5.0
    measured = Progress(time_s=100.0, number=0, attempt=1, done_steps=300.0)
    large = step(large, measured)[0]
    assert large.jobs.spread_steps_per_s[0, 0] == 4.0
    assert large.jobs.steps_per_s[0, 0] == 9.0


def test_smaller_jobs_move_for_a_gang_that_cannot_be_spread() -> None:
    whole = job(2, gang=3, slow=0.0, spread_steps_per_s=(0.0, 0.0))
    state = submit(submit(fleet(6), job(0, slow=0.0)), job(1, gang=2, slow=0.0))
    state = submit(state, whole)
    assert state.devices_of(2) == (), "three devices are free, but not on one server"
    state, actions = step(state, Tick(time_s=state.next_tick_s))
    assert [stop.reason for stop in actions.stops] == ["moved"]
    assert len(state.devices_of(2)) == 3
    assert len({int(name[4:]) // 4 for name in state.devices_of(2)}) == 1
    assert (state.jobs.rows["rate"] > 0.0).all()
    never = submit(fleet(6), replace(whole, gang=5))
    assert "one server; the largest has 4" in reason(never, 2)


def test_a_late_report_of_an_earlier_attempt_does_not_count() -> None:
    state = submit(fleet(1), job(0))
    state, _ = step(state, Fail(time_s=10.0, number=0, attempt=1))
    assert state.jobs.rows["attempt"][0] == 2
    late = Progress(time_s=10.0, number=0, attempt=1, done_steps=500.0, saved_steps=500.0)
    state, _ = step(state, late)
    assert state.jobs.rows["done_steps"][0] == state.jobs.rows["saved_steps"][0] == 0.0


def test_a_job_that_waits_for_a_type_does_not_hold_up_those_of_others() -> None:
    rules = Rules(policy="fifo-strict")
    state = submit(fleet(2, 1, rules), job(0, gang=1), job(1, gang=2, slow=0.0))
    state = submit(state, job(2, slow=0.0), job(3))
    assert state.jobs.rows["device_type"].tolist() == [0, -1, -1, 1]


def test_a_device_that_a_job_does_not_move_to_is_given_out_in_the_same_round() -> None:
    state = submit(fleet(1, 1), job(0, fast=1.0, slow=2.0), job(1, slow=0.0))
    assert (state.devices_of(0), state.devices_of(1)) == (("slow0",), ("fast0",))
    # Job 0 comes first on the device of job 1, on which it is no faster, so it stays.
    deficits = state.jobs._replace(
        shares=np.array([[0.5, 0.5], [0.5, 0.0]]),
        credit_s=np.array([[1000.0, 0.0], [-1000.0, 0.0]]),
    )
    state, _ = step(state.but(jobs=deficits), Tick(time_s=state.next_tick_s))
    assert (state.devices_of(0), state.devices_of(1)) == (("slow0",), ("fast0",))


def test_short_jobs_do_not_go_first_where_the_last_end_counts() -> None:
    def first(policy: str) -> int:
        state = submit(fleet(1, rules=Rules(policy=policy)), job(0, slow=0.0, steps=1e6))
        state = submit(state, job(1, slow=0.0, steps=1e4))
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        return int(state.holders[0, 0])

    assert (first("las"), first("makespan")) == (1, 0)


def test_gangs_sit_on_few_servers() -> None:
    state = submit(fleet(8), job(0), job(1, gang=4))
    assert state.devices_of(1) == ("fast0", "fast1", "fast2", "fast3") or state.devices_of(1) == (
        "fast4", "fast5", "fast6", "fast7",
    )  # fmt: skip


@pytest.mark.parametrize("mechanism", ["gavel", "improved"])
def test_whole_numbers_compile_nothing_anew(mechanism: str) -> None:
    from hocket.fleet.rounds.kernels.count import count
    from hocket.fleet.rounds.kernels.place import run_round

    kernels = [cast(Any, kernel) for kernel in (count, run_round)]
    known = []
    for one in (1.0, 1):
        rules = Rules(
            mechanism=mechanism,
            round_s=360 * one,
            slack_rounds=one,
            patience_rounds=9 * one,
            stickiness_rounds=one,
            restart_s=one,
        )
        state = step(fleet(2, rules=rules), Submit(time_s=one, jobs=(job(0, steps=one),)))[0]
        step(state, Tick(time_s=400 * one))
        known.append([len(kernel.entry.signatures) for kernel in kernels])
    assert known[0] == known[1]


def test_a_lost_device_costs_at_most_a_round() -> None:
    state = submit(fleet(1, 1), job(0))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    state, actions = step(state, RemoveDevices(time_s=500.0, names=("fast0",)))
    assert [stop.reason for stop in actions.stops] == ["device lost"]
    assert [start.devices for start in actions.starts] == [("slow0",)]
    assert state.jobs.rows["done_steps"][0] == 720.0


def test_restart_time_is_paid_once_per_start() -> None:
    state = submit(fleet(1, rules=Rules(restart_s=60.0)), job(0))
    for _ in range(3):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.jobs.rows["done_steps"][0] == pytest.approx(2.0 * (3 * 360 - 60))


def test_measurements_correct_throughputs() -> None:
    state = submit(fleet(1), job(0))
    state, _ = step(state, Progress(time_s=100.0, number=0, attempt=1, done_steps=100.0))
    assert state.jobs.steps_per_s[0, 0] == 1.5
    state, _ = step(state, Progress(time_s=200.0, number=0, attempt=1, done_steps=200.0))
    assert state.jobs.steps_per_s[0, 0] == 1.25


def test_a_job_that_keeps_crashing_is_given_up() -> None:
    state = submit(fleet(1, rules=Rules(max_failures=2)), job(0))
    state, first = step(state, Fail(time_s=1.0, number=0, attempt=1))
    state, second = step(state, Fail(time_s=2.0, number=0, attempt=2))
    assert [stop.reason for stop in first.stops] == ["failed"]
    assert [stop.reason for stop in second.stops] == ["given up"]


def test_reasons_carry_evidence() -> None:
    state = submit(
        fleet(1, 2), job(0, slow=0.0), job(1, slow=0.0), job(2, gang=3), job(3, 0.0, 0.0)
    )
    assert reason(state, 0) == "runs on fast0"
    assert "0 of 1 fast free" in reason(state, 1)
    assert "at most 2" in reason(state, 2)
    assert "no device type" in reason(state, 3)
    state, _ = step(state, Pause(time_s=1.0, numbers=(0,)))
    assert "paused" in reason(state, 0)


def test_a_job_that_had_its_share_is_not_owed_less_than_nothing() -> None:
    state = submit(fleet(2, rules=Rules()), *(job(number, slow=0.0) for number in range(3)))
    told = set()
    for _ in range(40):
        waiting = state.jobs.rows["number"][state.jobs.rows["phase"] == WAITING]
        told |= {reason(state, int(number)) for number in waiting}
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert not [text for text in told if "deficit of -" in text or "deficit of 0.0" in text]
    assert any("has had its share so far" in text for text in told)
    assert any("deficit of 1.3 rounds" in text or "deficit of 2.0 rounds" in text for text in told)


def test_a_resumed_job_waits_for_new_shares() -> None:
    state = submit(fleet(1), job(0, slow=0.0), job(1, slow=0.0))
    state, _ = step(state, Pause(time_s=1.0, numbers=(1,)))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    state, _ = step(state, Resume(time_s=state.time_s + 1.0, numbers=(1,)))
    assert reason(state, 1).startswith("waits for new shares (0 of 1 fast free)")


def test_rounds_go_on_beside_a_drained_device() -> None:
    bound = replace(job(0), preemptible=False)
    state = submit(fleet(2), bound, job(1))
    held = state.devices_of(0)
    state, actions = step(state, Drain(time_s=1.0, names=held))
    assert not list(actions.stops), "a job that saves nothing stays"
    for round_number in range(2, 5):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        assert state.round_number == round_number
        assert state.devices_of(0) == held
    state, actions = step(state, Drain(time_s=state.time_s, names=state.devices_of(1)))
    assert [(stop.number, stop.reason) for stop in actions.stops] == [(1, "drained")]
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.devices_of(1) == ()


def test_devices_of_one_server_may_come_one_by_one() -> None:
    state = fleet(0)
    for at in range(4):
        device = FleetDevice(name=f"d{at}", device_type="fast", server="s")
        state, _ = step(state, AddDevices(time_s=float(at), devices=(device,)))
        state = unpack(pack(state))
    assert state.layout.largest_server.tolist() == [4, 0]
    state, _ = step(state, RemoveDevices(time_s=5.0, names=("d0", "d1")))
    back = (
        FleetDevice(name="d0", device_type="slow", server="s"),
        FleetDevice(name="d1", device_type="fast", server="t"),
    )
    state, _ = step(state, AddDevices(time_s=6.0, devices=back))
    assert state.num_devices.tolist() == [3, 1]
    assert state.layout.largest_server.tolist() == [2, 1]
    with pytest.raises(UsageError, match="there as"):
        step(state, AddDevices(time_s=7.0, devices=(FleetDevice(name="d2", device_type="slow"),)))


def test_shares_wait_for_the_next_round_where_no_device_is_free() -> None:
    state = submit(fleet(1), job(0))
    assert not state.is_dirty
    state, actions = step(state, Submit(time_s=state.time_s + 1.0, jobs=(job(1),)))
    assert not len(actions.started)
    assert state.is_dirty, "nothing to hand out, so nothing was solved"
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert not state.is_dirty
