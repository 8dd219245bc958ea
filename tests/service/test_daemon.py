"""Decide, commit, act: the daemon without threads, in a state that tests make."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from service.daemon_rig import DEVICE_TYPES, RULES, Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.base.errors import UsageError
from hocket.fleet.rounds.events import Event, Finish
from hocket.fleet.rounds.state import FleetDevice
from hocket.service.daemon.transaction import Transaction
from hocket.service.executors.executor import AttemptName

FIRST, SECOND = AttemptName(1, 1), AttemptName(2, 1)


# ── jobs from submission to end ──


def test_a_job_runs_and_succeeds(rig, engine):
    number = rig.submit(total_steps=100.0)
    assert (number, rig.status(1)) == (1, "starting")
    rig.look(2)
    assert rig.status(1) == "running"
    assert rig.job(1).devices == ("v100-0",)
    engine.exit(FIRST, 0)
    rig.look(2)
    job = rig.job(1)
    assert (job.status, job.done_steps, job.devices) == ("succeeded", 100.0, ())
    assert engine.history == [("start", FIRST), ("forget", FIRST)]
    kinds = [event.kind for event in rig.store.events() if event.job == 1]
    assert kinds == ["submitted", "started", "stopped", "succeeded"]


def test_an_attempt_is_told_all_that_its_processes_must_know(rig, engine):
    rig.submit(
        environment={"A": "b", "HOCKET_JOB": "9"}, resume=("--resume",), grace_s=5.0,
        folder="/data", model="gpt2", plans={"v100": "/plans/v100.json", "k80": "/k80.json"},
    )  # fmt: skip
    rig.look()
    told = engine.processes[FIRST].assignment
    assert told.command == ("python", "train.py")
    assert told.environment["A"] == "b"
    assert told.environment["HOCKET_JOB"] == "1"
    assert told.environment["HOCKET_TOKEN"] == rig.token(FIRST)
    assert told.environment["HOCKET_DEVICES"] == "v100-0"
    assert told.environment["HOCKET_PLAN"] == "/plans/v100.json"
    assert "HOCKET_CHECKPOINT" not in told.environment
    assert (told.device_type, told.grace_s, str(told.work_folder)) == ("v100", 5.0, "/data")
    assert told.log_file == rig.folder / "logs" / "1" / "attempt-1.log"
    rig.checkpoint(FIRST, 5.0)
    engine.exit(FIRST, 1)
    rig.look(2)
    told = engine.processes[AttemptName(1, 2)].assignment
    assert told.command == ("python", "train.py", "--resume")
    assert told.environment["HOCKET_CHECKPOINT"] == "/checkpoints/5.0"
    assert told.environment["HOCKET_TOKEN"] != rig.token(FIRST)


def test_a_model_that_nobody_planned_is_refused(rig):
    with pytest.raises(UsageError, match="nobody planned 'gpt2'"):
        rig.submit(model="gpt2")
    assert rig.submit() == 1, "it has not taken a number"


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [(3, "attempt 3 ended with exit code 3"), (-9, "attempt 3 was killed by signal 9")],
)
def test_a_job_that_fails_too_often_is_given_up(rig, engine, exit_code, message):
    rig.submit()
    for attempt in range(1, 4):
        rig.look(2)
        engine.exit(AttemptName(1, attempt), exit_code)
        rig.look()
    job = rig.job(1)
    assert (job.status, job.failures, job.message) == ("failed", 3, message)
    rig.look(2)
    assert engine.running() == []


def test_a_lost_attempt_goes_back_to_its_last_checkpoint(rig, engine):
    rig.submit(total_steps=1000.0)
    rig.look(2)
    rig.checkpoint(FIRST, 40.0)
    rig.time.now_s += 1.0
    rig.report(FIRST, 70.0)
    engine.lose(FIRST)
    rig.look()
    assert rig.job(1).done_steps == 40.0
    assert rig.service_state.state.jobs.rows["done_steps"][0] == 40.0
    assert "its supervisor died" in rig.job(1).message


def test_a_checkpoint_tells_what_is_saved_and_is_no_measurement(rig, engine):
    rig.submit(total_steps=1000.0, throughputs={"v100": 2.0})
    rig.look(2)
    rig.time.now_s += 10.0
    rig.report(FIRST, 20.0)
    rig.time.now_s += 5.0
    rig.checkpoint(FIRST, 20.0)
    row = rig.service_state.state.jobs.rows[0]
    assert (row["saved_steps"], row["done_steps"]) == (20.0, 30.0)
    rig.time.now_s += 5.0
    rig.report(FIRST, 40.0)
    assert rig.service_state.state.jobs.steps_per_s[0, 0] == pytest.approx(2.0)
    engine.lose_devices("v100-0")
    rig.look()
    assert rig.service_state.state.jobs.rows["done_steps"][0] == 20.0


@pytest.mark.parametrize("saved", [1, 2])
def test_of_two_that_may_be_displaced_the_one_that_saved_is(tmp_path, saved):
    rules = dataclasses.replace(RULES, stickiness_rounds=0.0, slack_rounds=0.0)
    rig = Rig(tmp_path, FakeExecutor(fleet_devices(v100=2)), Time(), rules=rules)
    rig.look()
    for _ in range(2):
        rig.submit(total_steps=1e6)
    rig.look(2)
    rig.submit(total_steps=1e6)
    for nth in range(1, 7):
        rig.time.now_s += 59.0
        rig.checkpoint(AttemptName(saved, 1), 59.0 * nth)
        rig.later(1.0)
        rig.look(3)
        if rig.status(3) == "running":
            break
    assert rig.status(3) == "running"
    assert [number for number in (1, 2) if rig.status(number) == "queued"] == [saved]
    rig.die()


def test_every_round_is_noted_also_one_that_a_submission_begins(rig):
    rig.submit()
    rig.later(61.0)
    rounds = [event.detail["round"] for event in rig.store.events() if event.kind == "round"]
    assert rounds == list(range(1, rig.service_state.state.round_number + 1))
    first = next(event for event in rig.store.events() if event.kind == "submitted")
    noted = {event.kind for event in rig.store.events() if event.time_s == first.time_s}
    assert {"round", "started"} <= noted


def test_a_script_that_exits_well_when_asked_to_stop_has_not_finished(rig, engine):
    engine.stop_exit_code = 0
    rig.submit()
    rig.look(2)
    rig.change("pause", 1)
    assert rig.status(1) == "stopping"
    rig.look(2)
    assert rig.status(1) == "paused"
    rig.change("resume", 1)
    rig.look(2)
    assert rig.status(1) == "running"
    assert rig.job(1).attempt == 2


def test_one_that_says_it_finished_has_even_where_it_was_to_stop(rig, engine):
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.change("pause", 1)
    lease = rig.report(FIRST, 10.0)
    assert not lease.may_run
    assert lease.stop_by_s == rig.time.now_s + 30.0
    rig.report(FIRST, 12.0, is_finished=True)
    assert rig.status(1) == "stopping"
    engine.exit(FIRST, -15)
    rig.look()
    assert rig.status(1) == "succeeded"


def test_one_that_says_it_finished_has_its_grace_to_clean_up(rig, engine):
    rig.submit(grace_s=20.0)
    rig.look(2)
    rig.report(FIRST, 10.0, is_finished=True)
    rig.look(2)
    assert engine.processes[FIRST].num_stops == 0
    rig.time.now_s += 21.0
    rig.look()
    assert engine.processes[FIRST].num_stops == 1
    rig.look()
    assert rig.status(1) == "succeeded"


def test_a_silent_attempt_is_stopped_and_counts_as_failed(rig, engine):
    rig.submit(silence_s=10.0)
    rig.look(2)
    rig.time.now_s += 8.0
    rig.heard[FIRST] = rig.time.now_s
    rig.time.now_s += 8.0
    rig.look()
    assert rig.job(1).failures == 0
    rig.time.now_s += 8.0
    rig.look(2)
    assert engine.processes[FIRST].num_stops == 1
    assert (rig.job(1).failures, rig.job(1).message) == (
        1,
        "attempt 1 reported nothing for 10 s",
    )


def test_an_engine_that_does_not_kill_is_told_to(rig, engine):
    engine.are_stubborn = True
    rig.submit(grace_s=5.0)
    rig.look(2)
    rig.change("cancel", 1)
    rig.look()
    assert engine.running() == [FIRST]
    rig.time.now_s += 16.0
    rig.look(2)
    assert ("kill", FIRST) in engine.history
    assert rig.status(1) == "cancelled"


# ── devices ──


def test_a_start_waits_until_its_devices_are_left(rig, engine):
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.submit()
    rig.change("cancel", 1)
    assert rig.service_state.state.devices_of(2) == ("v100-0",), "the state gave it away already"
    rig.look(3)
    assert engine.running() == [FIRST]
    assert rig.store.attempts(2)[0].started_s is None
    engine.exit(FIRST, -15)
    rig.look(2)
    assert engine.running() == [SECOND]
    assert rig.store.attempts(2)[0].started_s is not None


def test_a_waiting_attempt_that_is_stopped_never_starts(rig, engine):
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.submit()
    rig.change("cancel", 1)
    rig.change("pause", 2)
    assert rig.store.attempts(2)[0].ended_s is not None
    assert rig.status(2) == "paused"
    engine.exit(FIRST, -15)
    rig.look(3)
    assert ("start", SECOND) not in engine.history


def test_a_job_never_runs_twice_even_on_other_devices(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=2), are_stubborn=True)
    rig = Rig(tmp_path, engine, Time())
    rig.look()
    rig.submit()
    rig.look(2)
    rig.change("pause", 1)
    rig.submit()
    rig.change("resume", 1)
    assert set(rig.service_state.state.devices_of(1)).isdisjoint(
        engine.processes[FIRST].assignment.devices
    )
    rig.look(3)
    assert sorted(engine.running()) == [FIRST] or sorted(engine.running()) == [FIRST, SECOND]
    engine.exit(FIRST, -15)
    rig.look(2)
    assert AttemptName(1, 2) in engine.running()
    rig.die()


def test_a_lost_device_is_no_failure_of_its_job(rig, engine):
    rig.submit()
    rig.look(2)
    engine.lose_devices("v100-0")
    rig.look(2)
    assert (rig.status(1), rig.job(1).failures) == ("queued", 0)
    assert not rig.service_state.state.is_up[0]
    engine.devices = fleet_devices(v100=1)
    rig.look(3)
    assert rig.status(1) == "running"
    kinds = [event.kind for event in rig.store.events()]
    assert kinds.count("device-lost") == 1
    assert kinds.count("device-added") == 2


def test_devices_of_an_unknown_type_are_complained_about_not_used(rig, engine):
    engine.devices = (*fleet_devices(tpu=1), *fleet_devices(k80=1))
    rig.look(3)
    state = rig.service_state.state
    assert state.device_names == ("v100-0", "k80-0")
    assert state.is_up.tolist() == [False, True], "those of known device types are still minded"
    assert "'tpu'" in rig.reconciler.trouble
    told = [event.detail for event in rig.store.events() if event.kind == "device-type-unknown"]
    assert told == [{"device_type": "tpu"}], "once, not at every look"
    engine.devices = engine.devices[1:]
    rig.look()
    assert rig.reconciler.trouble == ""


def test_a_device_that_comes_back_as_another_type_is_used_as_that(rig, engine):
    rig.submit(throughputs={"v100": 1.0})
    rig.look(2)
    engine.lose_devices("v100-0")
    engine.devices = (FleetDevice(name="v100-0", device_type="k80", server="v100-server-0"),)
    rig.look(3)
    state = rig.service_state.state
    assert [(one, bool(up)) for one, up in zip(state.type_of_device, state.is_up, strict=True)] == [
        (DEVICE_TYPES.index("k80"), True)
    ]
    assert (rig.status(1), rig.job(1).failures) == ("queued", 0), "it cannot run there"


def test_a_node_that_is_lost_ends_all_its_attempts_with_one_decision(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=20))
    rig = Rig(tmp_path, engine, Time())
    rig.look()
    for _ in range(20):
        rig.submit()
    rig.look(2)
    assert {rig.status(number) for number in range(1, 21)} == {"running"}
    commits: list[str] = []
    rig._on_commit = commits.append
    engine.lose_devices(*(device.name for device in engine.devices))
    rig.look()
    assert commits.count("after commit") == 2, "devices, then attempts"
    assert [rig.job(number).failures for number in range(1, 21)] == [0] * 20
    rig.die()


def test_jobs_that_finish_together_are_decided_together_but_none_delays_another(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=3))
    rig = Rig(tmp_path, engine, Time())
    rig.look()
    for _ in range(3):
        rig.submit()
    rig.look(2)
    decided: list[int] = []

    def failing(transaction: Transaction, event: Event, **values: Any) -> None:
        if isinstance(event, Finish):
            decided.append(len(event.numbers))
            assert 2 not in event.numbers, "a bug"
        apply_event(transaction, event, **values)

    apply_event = Transaction.apply_event
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "apply_event", failing)
        for number in (1, 2, 3):
            engine.exit(AttemptName(number, 1), 0)
        rig.look(3)
    assert decided[0] == 3
    assert [rig.status(number) for number in (1, 2, 3)] == ["succeeded", "running", "succeeded"]
    assert "a bug" in rig.reconciler.trouble
    rig.look(2)
    assert rig.status(2) == "succeeded"
    rig.die()
