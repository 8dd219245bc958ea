"""Forecasts: they decide as the simulator does, keep their bounds, and are told in a sentence."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from fleet.test_simulator import devices, small_work
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.fleet.explain import explain
from hocket.fleet.forecast import at_moment, first_start, forecast, next_event, resized
from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, new_state, step
from hocket.fleet.rounds.events import Pause, Progress, Submit, Tick
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import RUNNING, WAITING
from hocket.fleet.simulator import simulate
from hocket.fleet.what_if import TwoFutures, what_if

DEVICE_TYPES = ("fast", "slow")


def fleet(
    jobs: list[dict], num_fast: int = 1, num_slow: int = 0, rules: Rules | None = None
) -> FleetState:
    """A fleet that was given these jobs at once."""
    all_devices = tuple(
        FleetDevice(name=f"{device_type}-{at}", device_type=device_type)
        for device_type, count in zip(DEVICE_TYPES, (num_fast, num_slow), strict=True)
        for at in range(count)
    )
    state = new_state(DEVICE_TYPES, all_devices, rules or Rules(policy="fifo", slack_rounds=0.0))
    full = tuple(
        Job(**{"number": at + 1, "name": f"job {at + 1}", "steps_per_s": (1.0, 0.5), **job})
        for at, job in enumerate(jobs)
    )
    return step(state, Submit(time_s=0.0, jobs=full))[0]


@pytest.mark.parametrize("is_guess", [True, False])
def test_the_first_measurement_replaces_a_guess_and_corrects_what_was_stated(is_guess):
    """A job of which nothing is stated is taken to do one step per second; it does ten."""
    state = fleet([{"total_steps": 600.0}, {"total_steps": 600.0}])
    assert first_start(state, 2).start_of(2) == 600.0
    first = Progress(time_s=5.0, number=1, attempt=1, done_steps=50.0, replaces_guess=is_guess)
    state = step(state, first)[0]
    rate = 10.0 if is_guess else (10.0 + 1.0) / 2.0
    assert first_start(state, 2).start_of(2) == pytest.approx(5.0 + 550.0 / rate)
    # Later ones are weighed against those before, whichever way the first was taken.
    state = step(state, Progress(time_s=10.0, number=1, attempt=1, done_steps=100.0))[0]
    rate = (10.0 + rate) / 2.0
    assert first_start(state, 2).start_of(2) == pytest.approx(10.0 + 500.0 / rate)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["las", "fifo", "makespan", "finish-time-fairness", "min-cost"]),
    mechanism=st.sampled_from(["improved", "improved", "gavel"]),
    restart_s=st.sampled_from([0.0, 30.0]),
)
def test_forecast_decides_as_the_simulator_does(seed, policy, mechanism, restart_s):
    work = small_work(seed, most_steps=5e3)
    seen: list[FleetState] = []

    def check(state, event, actions):
        if isinstance(event, Submit):
            seen.append(state)

    rules = Rules(policy=policy, mechanism=mechanism, restart_s=restart_s)
    run = simulate(work, devices(2, work.device_types), rules, check=check)
    ahead = forecast(seen[-1], max_events=100_000)
    assert not ahead.is_cut_off
    np.testing.assert_array_equal(ahead.end_s, run.end_s[ahead.numbers])
    waits = np.isnan(run.start_s[ahead.numbers]) | (run.start_s[ahead.numbers] > seen[-1].time_s)
    np.testing.assert_array_equal(ahead.start_s[waits], run.start_s[ahead.numbers][waits])


def test_forecast_in_closed_form():
    # One device, first in, first out: 100 s, then 50 s, then one that nobody knows the end of.
    state = fleet([{"total_steps": 100.0}, {"total_steps": 50.0}, {}])
    ahead = forecast(state)
    assert ahead.start_s.tolist() == [0.0, 100.0, 150.0]
    assert ahead.end_s[:2].tolist() == [100.0, 150.0]
    assert ahead.end_of(3) is None
    assert not ahead.is_cut_off
    assert ahead.average_completion_s == 125.0
    assert ahead.last_end_s == 150.0
    assert ahead.utilisation == 1.0
    assert first_start(state, 2).start_of(2) == 100.0


def test_forecast_leaves_the_state_alone():
    state = fleet([{"total_steps": 100.0}, {"total_steps": 50.0}])
    before = (state.jobs.rows.tobytes(), state.holders.tobytes(), state.jobs.credit_s.tobytes())
    forecast(
        state, policy="las", add=(FleetDevice(name="x", device_type="fast"),), remove=("fast-0",)
    )
    assert before == (
        state.jobs.rows.tobytes(), state.holders.tobytes(), state.jobs.credit_s.tobytes()
    )  # fmt: skip


def test_forecast_is_bounded_and_says_so():
    state = fleet([{"total_steps": 1e9}, {"total_steps": 1e9}], rules=Rules(policy="las"))
    ahead = forecast(state, max_events=7)
    assert ahead.num_events == 7
    assert ahead.is_cut_off
    assert ahead.num_ended == 0
    assert np.isnan(ahead.average_completion_s)


def test_forecast_does_not_wait_for_what_cannot_happen():
    state = fleet([{"total_steps": 10.0}, {"gang": 5, "total_steps": 10.0}, {"total_steps": 10.0}])
    state = step(state, Pause(time_s=0.0, numbers=(3,)))[0]
    ahead = forecast(state)
    assert not ahead.is_cut_off
    assert ahead.num_events < 10
    assert [ahead.start_of(number) for number in (1, 2, 3)] == [0.0, None, None]


def test_coarse_forecast_is_near_the_exact_one():
    random = np.random.default_rng(3)
    jobs = [{"total_steps": float(steps)} for steps in random.uniform(100, 4_000, 90)]
    state = fleet(jobs, num_fast=15)
    exact = forecast(state, max_events=10_000)
    coarse = forecast(state, grain_s=180.0, max_events=10_000)
    assert coarse.num_events < 0.75 * exact.num_events
    assert coarse.average_completion_s == pytest.approx(exact.average_completion_s, rel=0.02)
    assert np.abs(coarse.end_s - exact.end_s).max() < 3 * 180.0


def test_more_devices_end_sooner_and_fewer_later():
    state = fleet([{"total_steps": 1000.0}] * 4, num_fast=2)
    more = what_if(state, num_devices={"fast": 4})
    assert more.average_completion_s == (1500.0, 1000.0)
    fewer = what_if(state, num_devices={"fast": 1})
    now_s, then_s = fewer.average_completion_s
    assert then_s > now_s
    assert fewer.num_ended == (4, 4)
    assert not np.isfinite(fewer.horizon_s)


def test_another_policy_is_what_it_says():
    # The short job waits under FIFO and goes first under shortest-job-first at the next round.
    state = fleet([{"total_steps": 5000.0}, {"total_steps": 4000.0}, {"total_steps": 10.0}])
    asked = what_if(state, policy="shortest-job-first")
    assert asked.now.policy == "fifo"
    assert asked.then.policy == "shortest-job-first"
    assert asked.then.end_of(3) < asked.now.end_of(3)
    assert json.loads(json.dumps(asked.to_data(), allow_nan=False))["then"]["num_ended"] == 3


def test_futures_are_compared_only_as_far_as_both_reach():
    jobs = [{"total_steps": float(10 * at)} for at in range(1, 41)]
    state = fleet(jobs)
    now, then = forecast(state, max_events=5), forecast(state, max_events=100)
    both = TwoFutures(now=now, then=then)
    assert both.horizon_s == now.reached_s
    assert both.num_ended == (now.num_ended, now.num_ended)
    assert both.average_completion_s[0] == both.average_completion_s[1]


def test_devices_that_go_are_idle_ones_first():
    state = fleet([{"total_steps": 100.0}], num_fast=3)
    (held,) = state.devices_of(1)
    assert held not in resized(state, {"fast": 1})[1]
    assert len(resized(state, {"fast": 1})[1]) == 2
    add, remove = resized(state, {"fast": 5, "slow": 1})
    assert [device.device_type for device in add] == ["fast", "fast", "slow"]
    assert remove == ()
    assert not {device.name for device in add} & set(state.device_names)


@pytest.mark.parametrize("counts", [{"fasst": 1}, {"fast": -1}, {"fast": 10**9}])
def test_impossible_devices_are_refused(counts):
    with pytest.raises(UsageError):
        resized(fleet([{}]), counts)


def test_unknown_names_are_refused():
    state = fleet([{}])
    for wrong in ({"policy": "lass"}, {"remove": ("nothing",)}):
        with pytest.raises(UsageError, match="unknown"):
            forecast(state, **wrong)
    with pytest.raises(UsageError, match="no job 9"):
        explain(state, 9)
    with pytest.raises(UsageError, match="no job 9"):
        forecast(state).start_of(9)


@pytest.mark.parametrize("preemptible", [None, False, True])
def test_who_waits_for_a_job_that_may_save_is_told_both_moments(preemptible):
    state = fleet([{"total_steps": 5000.0, "preemptible": preemptible}], rules=Rules(policy="las"))
    second = Job(number=2, name="second", steps_per_s=(1.0, 0.5), total_steps=100.0)
    state = step(state, Submit(time_s=0.0, jobs=(second,)))[0]
    told = explain(state, 2)
    does_save, does_not = (
        first_start_of(state, 2, saves=True),
        first_start_of(state, 2, saves=False),
    )
    assert does_save < does_not == 5000.0
    expected_s = does_save if preemptible else does_not
    earliest_s = does_save if preemptible is None else None
    assert (told.estimated_start_s, told.earliest_start_s) == (expected_s, earliest_s)
    assert ("show that they do" in told.sentence) == (preemptible is None)


def first_start_of(state, number, *, saves):
    """When a job starts if the first shows now that it saves its work, or never does."""
    rows = state.jobs.rows.copy()
    rows["preemptible"][0] = saves
    state = state.but(jobs=state.jobs._replace(rows=rows))
    while state.jobs.rows["phase"][state.row_of(number)] == WAITING:
        state, _ = step(state, next_event(state))
    return state.time_s


# ── explanations ─────────────────────────────────────────────────────────────────────────────────


def test_explanation_says_why_who_and_when():
    state = fleet([{"total_steps": 100.0}, {"total_steps": 50.0}, {"total_steps": 50.0}])
    told = explain(state, 3)
    assert told.estimated_start_s == 150.0
    assert reason(state, 3) in told.sentence
    # Nothing but the reservation, which says the same.
    assert told.sentence.endswith("its start is predicted in 150 s")
    assert told.evidence["holders"] == [
        {"job": 1, "device_type": "fast", "devices": 1, "seconds_left": 100.0}
    ]
    (device_type,) = [
        device_type for device_type in told.evidence["device_types"] if device_type["devices"]
    ]
    assert (device_type["device_type"], device_type["devices"], device_type["free"]) == (
        "fast",
        1,
        0,
    )


def test_time_limits_end_jobs_whose_length_nobody_knows():
    state = fleet([{"time_limit_s": 300.0}, {"total_steps": 50.0}, {}])
    made = forecast(state)
    assert [made.end_of(number) for number in (1, 2, 3)] == [300.0, 350.0, None]
    told = explain(state, 2)
    assert told.estimated_start_s == 300.0
    assert "nobody knows" not in told.sentence
    (holder,) = told.evidence["holders"]
    assert holder["seconds_left"] == 300.0


def test_a_job_that_has_a_limit_and_a_length_ends_at_the_first():
    job = {"total_steps": 100.0, "time_limit_s": 30.0}
    made = forecast(fleet([job, {**job, "time_limit_s": 200.0}]))
    assert [made.end_of(number) for number in (1, 2)] == [30.0, 130.0]


def test_jobs_that_come_after_others_are_part_of_the_forecast():
    jobs = [
        {"total_steps": 100.0},
        {"total_steps": 50.0, "after": ((1, "ok"),)},
        {"total_steps": 50.0, "after": ((2, "any"),)},
        {"total_steps": 10.0, "after": ((1, "failed"),)},
        {"total_steps": 500.0},
    ]
    made = forecast(fleet(jobs))
    ends_s = [made.end_of(number) for number in range(1, 6)]
    assert ends_s == [100.0, 150.0, 200.0, None, 700.0]
    assert not made.is_cut_off


def test_holders_are_told_with_the_time_that_they_need_at_their_speed():
    state = fleet([{"total_steps": 100.0, "steps_per_s": (4.0, 0.0)}, {"total_steps": 50.0}])
    state = at_moment(state, 5.0)
    (holder,) = explain(state, 2).evidence["holders"]
    assert holder["seconds_left"] == pytest.approx((100.0 - 4.0 * 5.0) / 4.0)


def test_explanation_of_every_phase_is_plain_data():
    jobs = [{"total_steps": 100.0}, {}, {"gang": 9}, {"steps_per_s": (0.0, 0.0)}, {}]
    state = step(fleet(jobs), Pause(time_s=0.0, numbers=(5,)))[0]
    told = [explain(state, number) for number in range(1, 6)]
    for explanation in told:
        json.dumps(explanation.to_data(), allow_nan=False)
    assert [one.estimated_start_s for one in told] == [None, 100.0, None, None, None]
    # Nothing that is waited for would start these: not "later", but never.
    assert all(one.not_before_s is None for one in told)


def test_evidence_of_a_paused_job_promises_nothing():
    state = fleet([{}], num_slow=1, rules=Rules())
    assert explain(state, 1).evidence["target_share"] > 0.0
    paused = step(state, Pause(time_s=1.0, numbers=(1,)))[0]
    told = explain(paused, 1).evidence
    assert told["target_share"] == 0.0
    assert [device_type["target_share"] for device_type in told["device_types"]] == [0.0, 0.0]


def test_a_gang_that_no_server_can_hold_never_starts():
    # Each device is a server of its own here.
    state = fleet([{"gang": 2, "spread_steps_per_s": (0.0, 0.0)}, {}], num_fast=3)
    told = explain(state, 1)
    assert told.sentence.endswith("on one server; the largest has 1")
    assert told.not_before_s is None


def test_explanation_says_how_far_it_looked():
    state = fleet([{}, {"total_steps": 10.0}])
    told = explain(state, 2)
    assert told.estimated_start_s is None
    assert told.not_before_s > 0.0
    assert "not expected to start within" in told.sentence


@pytest.mark.parametrize("num_endless", [1, 5])
def test_explanation_names_jobs_of_which_nobody_knows_when_they_end(num_endless):
    known = {"total_steps": 1e9}
    jobs = [*([{}] * num_endless), known, {"total_steps": 10.0}]
    state = fleet(jobs, num_fast=num_endless + 1)
    sentence = explain(state, len(jobs)).sentence
    who = "job 1 holds" if num_endless == 1 else "jobs 1, 2, 3 and 2 more hold"
    assert f": {who} devices that it could use, and nobody knows until when" in sentence
    assert "neither total_steps nor time_limit_s" in sentence
    all_known = fleet([known, {"total_steps": 10.0}])
    assert "nobody knows" not in explain(all_known, 2).sentence


def test_accounts_are_brought_up_to_a_moment():
    state = fleet([{"total_steps": 100.0}])
    later = at_moment(state, 40.0)
    assert later.jobs.rows["held_s"][0] == 40.0
    assert at_moment(state, state.next_tick_s + 1.0) is state
    assert at_moment(state, -1.0) is state


def test_a_large_fleet_is_explained_within_a_second():
    random = np.random.default_rng(0)
    device_types = ("v100", "p100", "k80")
    all_devices = tuple(
        FleetDevice(name=f"{device_type}-{i}", device_type=device_type)
        for device_type in device_types
        for i in range(100)
    )
    speeds = random.uniform(1.0, 10.0, (2048, 3)) * (1.0, 0.5, 0.25)
    jobs = tuple(
        Job(
            number=at + 1,
            name=f"job {at}",
            steps_per_s=tuple(speeds[at]),
            total_steps=float(60.0 * 10 ** random.uniform(1.5, 4) * speeds[at, 0]),
            gang=int(random.choice([1, 1, 1, 2, 4])),
        )
        for at in range(2048)
    )
    state = step(new_state(device_types, all_devices), Submit(time_s=0.0, jobs=jobs))[0]
    state = step(state, Tick(time_s=state.next_tick_s))[0]
    waiting = state.jobs.rows["number"][state.jobs.rows["phase"] == WAITING]
    assert (state.jobs.rows["phase"] == RUNNING).any()
    explain(state, int(waiting[0]))
    start_s = time.process_time()
    told = explain(state, int(waiting[-1]))
    assert time.process_time() - start_s < 1.0
    assert told.estimated_start_s or told.not_before_s


def test_an_earliest_start_that_is_no_earlier_is_not_told():
    bound = {"total_steps": 100.0, "steps_per_s": (1.0, 0.0), "preemptible": False}
    undecided = {"steps_per_s": (0.0, 1.0), "preemptible": None}
    waiting = {"total_steps": 10.0, "steps_per_s": (1.0, 0.0)}
    found = explain(fleet([bound, undecided, waiting], num_slow=1), 3)
    assert found.estimated_start_s == 100.0
    assert found.earliest_start_s is None
