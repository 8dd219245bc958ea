"""Decide, commit, act: the daemon without threads, in a world that tests make."""

from __future__ import annotations

import dataclasses
import sqlite3
from typing import Any

import numpy as np
import pytest
from service.daemon_rig import KINDS, RULES, Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.errors import InputFileError, RunError, UsageError
from hocket.fleet.policies import POLICIES
from hocket.fleet.rounds.events import Event, Finish
from hocket.fleet.rounds.state import MECHANISMS, Device, Rules
from hocket.service.daemon import commands
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.decider import Request
from hocket.service.daemon.draft import Draft
from hocket.service.daemon.rehearse import rehearse_day
from hocket.service.errors import (
    ConflictError,
    KeyReusedError,
    NotFoundError,
    StaleAttemptError,
    UnavailableError,
)
from hocket.service.executors.executor import AttemptName
from hocket.service.store.batch import Batch


@pytest.fixture
def executor():
    return FakeExecutor(fleet_devices(v100=1))


@pytest.fixture
def rig(tmp_path, executor):
    rig = Rig(tmp_path, executor, Time())
    rig.look()
    yield rig
    for life in rig.lives:
        life.die()


FIRST, SECOND = AttemptName(1, 1), AttemptName(2, 1)


# ── jobs from submission to end ──


def test_a_job_runs_and_succeeds(rig, executor):
    number = rig.submit(total_steps=100.0)
    assert (number, rig.status(1)) == (1, "starting")
    rig.look(2)
    assert rig.status(1) == "running"
    assert rig.job(1).devices == ("v100-0",)
    executor.exit(FIRST, 0)
    rig.look(2)
    job = rig.job(1)
    assert (job.status, job.done_steps, job.devices) == ("succeeded", 100.0, ())
    assert executor.history == [("start", FIRST), ("forget", FIRST)]
    kinds = [event.kind for event in rig.store.events() if event.job == 1]
    assert kinds == ["submitted", "started", "stopped", "succeeded"]


def test_an_attempt_is_told_all_that_its_processes_must_know(rig, executor):
    rig.submit(
        environment={"A": "b", "HOCKET_JOB": "9"}, resume=("--resume",), grace_s=5.0, folder="/data"
    )
    rig.look()
    told = executor.processes[FIRST].assignment
    assert told.command == ("python", "train.py")
    assert told.environment["A"] == "b"
    assert told.environment["HOCKET_JOB"] == "1"
    assert told.environment["HOCKET_TOKEN"] == rig.token(FIRST)
    assert told.environment["HOCKET_DEVICES"] == "v100-0"
    assert "HOCKET_CHECKPOINT" not in told.environment
    assert (told.kind, told.grace_s, str(told.work_folder)) == ("v100", 5.0, "/data")
    assert told.log_file == rig.folder / "jobs" / "1" / "attempt-1.log"
    rig.checkpoint(FIRST, 5.0)
    executor.exit(FIRST, 1)
    rig.look(2)
    told = executor.processes[AttemptName(1, 2)].assignment
    assert told.command == ("python", "train.py", "--resume")
    assert told.environment["HOCKET_CHECKPOINT"] == "/checkpoints/5.0"
    assert told.environment["HOCKET_TOKEN"] != rig.token(FIRST)


@pytest.mark.parametrize(
    ("exit_code", "message"),
    [(3, "attempt 3 ended with exit code 3"), (-9, "attempt 3 was killed by signal 9")],
)
def test_a_job_that_fails_too_often_is_given_up(rig, executor, exit_code, message):
    rig.submit()
    for attempt in range(1, 4):
        rig.look(2)
        executor.exit(AttemptName(1, attempt), exit_code)
        rig.look()
    job = rig.job(1)
    assert (job.status, job.failures, job.message) == ("failed", 3, message)
    rig.look(2)
    assert executor.running() == []


def test_a_lost_attempt_goes_back_to_its_last_checkpoint(rig, executor):
    rig.submit(total_steps=1000.0)
    rig.look(2)
    rig.checkpoint(FIRST, 40.0)
    rig.time.now_s += 1.0
    rig.report(FIRST, 70.0)
    executor.lose(FIRST)
    rig.look()
    assert rig.job(1).done_steps == 40.0
    assert rig.world.state.jobs.rows["done_steps"][0] == 40.0
    assert "its supervisor died" in rig.job(1).message


def test_a_checkpoint_tells_what_is_saved_and_is_no_measurement(rig, executor):
    rig.submit(total_steps=1000.0, throughputs={"v100": 2.0})
    rig.look(2)
    rig.time.now_s += 10.0
    rig.report(FIRST, 20.0)
    rig.time.now_s += 5.0
    rig.checkpoint(FIRST, 20.0)
    row = rig.world.state.jobs.rows[0]
    assert (row["saved_steps"], row["done_steps"]) == (20.0, 30.0)
    rig.time.now_s += 5.0
    rig.report(FIRST, 40.0)
    assert rig.world.state.jobs.steps_per_s[0, 0] == pytest.approx(2.0)
    executor.lose_devices("v100-0")
    rig.look()
    assert rig.world.state.jobs.rows["done_steps"][0] == 20.0


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
    assert rounds == list(range(1, rig.world.state.round_number + 1))
    first = next(event for event in rig.store.events() if event.kind == "submitted")
    noted = {event.kind for event in rig.store.events() if event.time_s == first.time_s}
    assert {"round", "started"} <= noted


def test_a_script_that_exits_well_when_asked_to_stop_has_not_finished(rig, executor):
    executor.stop_exit_code = 0
    rig.submit()
    rig.look(2)
    rig.change(commands.pause, 1)
    assert rig.status(1) == "stopping"
    rig.look(2)
    assert rig.status(1) == "paused"
    rig.change(commands.resume, 1)
    rig.look(2)
    assert rig.status(1) == "running"
    assert rig.job(1).attempt == 2


def test_one_that_says_it_finished_has_even_where_it_was_to_stop(rig, executor):
    executor.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.change(commands.pause, 1)
    lease = rig.report(FIRST, 10.0)
    assert not lease.may_run
    assert lease.stop_by_s == rig.time.now_s + 30.0
    rig.report(FIRST, 12.0, is_finished=True)
    assert rig.status(1) == "stopping"
    executor.exit(FIRST, -15)
    rig.look()
    assert rig.status(1) == "succeeded"


def test_one_that_says_it_finished_has_its_grace_to_clean_up(rig, executor):
    rig.submit(grace_s=20.0)
    rig.look(2)
    rig.report(FIRST, 10.0, is_finished=True)
    rig.look(2)
    assert executor.processes[FIRST].num_stops == 0
    rig.time.now_s += 21.0
    rig.look()
    assert executor.processes[FIRST].num_stops == 1
    rig.look()
    assert rig.status(1) == "succeeded"


def test_a_silent_attempt_is_stopped_and_counts_as_failed(rig, executor):
    rig.submit(silence_s=10.0)
    rig.look(2)
    rig.time.now_s += 8.0
    rig.heard[FIRST] = rig.time.now_s
    rig.time.now_s += 8.0
    rig.look()
    assert rig.job(1).failures == 0
    rig.time.now_s += 8.0
    rig.look(2)
    assert executor.processes[FIRST].num_stops == 1
    assert (rig.job(1).failures, rig.job(1).message) == (
        1,
        "attempt 1 reported nothing for 10 s",
    )


def test_an_engine_that_does_not_kill_is_told_to(rig, executor):
    executor.are_stubborn = True
    rig.submit(grace_s=5.0)
    rig.look(2)
    rig.change(commands.cancel, 1)
    rig.look()
    assert executor.running() == [FIRST]
    rig.time.now_s += 16.0
    rig.look(2)
    assert ("kill", FIRST) in executor.history
    assert rig.status(1) == "cancelled"


# ── devices ──


def test_a_start_waits_until_its_devices_are_left(rig, executor):
    executor.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.submit()
    rig.change(commands.cancel, 1)
    assert rig.world.state.devices_of(2) == ("v100-0",), "the state gave it away already"
    rig.look(3)
    assert executor.running() == [FIRST]
    assert rig.store.attempts(2)[0].started_s is None
    executor.exit(FIRST, -15)
    rig.look(2)
    assert executor.running() == [SECOND]
    assert rig.store.attempts(2)[0].started_s is not None


def test_a_waiting_attempt_that_is_stopped_never_starts(rig, executor):
    executor.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.submit()
    rig.change(commands.cancel, 1)
    rig.change(commands.pause, 2)
    assert rig.store.attempts(2)[0].ended_s is not None
    assert rig.status(2) == "paused"
    executor.exit(FIRST, -15)
    rig.look(3)
    assert ("start", SECOND) not in executor.history


def test_a_job_never_runs_twice_even_on_other_devices(tmp_path):
    executor = FakeExecutor(fleet_devices(v100=2), are_stubborn=True)
    rig = Rig(tmp_path, executor, Time())
    rig.look()
    rig.submit()
    rig.look(2)
    rig.change(commands.pause, 1)
    rig.submit()
    rig.change(commands.resume, 1)
    assert set(rig.world.state.devices_of(1)).isdisjoint(
        executor.processes[FIRST].assignment.devices
    )
    rig.look(3)
    assert sorted(executor.running()) == [FIRST] or sorted(executor.running()) == [FIRST, SECOND]
    executor.exit(FIRST, -15)
    rig.look(2)
    assert AttemptName(1, 2) in executor.running()
    rig.die()


def test_a_lost_device_is_no_failure_of_its_job(rig, executor):
    rig.submit()
    rig.look(2)
    executor.lose_devices("v100-0")
    rig.look(2)
    assert (rig.status(1), rig.job(1).failures) == ("queued", 0)
    assert not rig.world.state.is_up[0]
    executor.devices = fleet_devices(v100=1)
    rig.look(3)
    assert rig.status(1) == "running"
    kinds = [event.kind for event in rig.store.events()]
    assert kinds.count("device-lost") == 1
    assert kinds.count("device-added") == 2


def test_devices_of_an_unknown_kind_are_complained_about_not_used(rig, executor):
    executor.devices = (*fleet_devices(tpu=1), *fleet_devices(k80=1))
    rig.look(3)
    state = rig.world.state
    assert state.device_names == ("v100-0", "k80-0")
    assert state.is_up.tolist() == [False, True], "those of known kinds are still minded"
    assert "'tpu'" in rig.carrier.trouble
    told = [event.detail for event in rig.store.events() if event.kind == "kind-unknown"]
    assert told == [{"device_kind": "tpu"}], "once, not at every look"
    executor.devices = executor.devices[1:]
    rig.look()
    assert rig.carrier.trouble == ""


def test_a_device_that_comes_back_as_another_kind_is_used_as_that(rig, executor):
    rig.submit(throughputs={"v100": 1.0})
    rig.look(2)
    executor.lose_devices("v100-0")
    executor.devices = (Device(name="v100-0", kind="k80", server="v100-server-0"),)
    rig.look(3)
    state = rig.world.state
    assert [(one, bool(up)) for one, up in zip(state.device_kind, state.is_up, strict=True)] == [
        (KINDS.index("k80"), True)
    ]
    assert (rig.status(1), rig.job(1).failures) == ("queued", 0), "it cannot run there"


def test_a_node_that_is_lost_ends_all_its_attempts_with_one_decision(tmp_path):
    executor = FakeExecutor(fleet_devices(v100=20))
    rig = Rig(tmp_path, executor, Time())
    rig.look()
    for _ in range(20):
        rig.submit()
    rig.look(2)
    assert {rig.status(number) for number in range(1, 21)} == {"running"}
    commits: list[str] = []
    rig._on_commit = commits.append
    executor.lose_devices(*(device.name for device in executor.devices))
    rig.look()
    assert commits.count("after commit") == 2, "devices, then attempts"
    assert [rig.job(number).failures for number in range(1, 21)] == [0] * 20
    rig.die()


def test_jobs_that_finish_together_are_decided_together_but_none_delays_another(tmp_path):
    executor = FakeExecutor(fleet_devices(v100=3))
    rig = Rig(tmp_path, executor, Time())
    rig.look()
    for _ in range(3):
        rig.submit()
    rig.look(2)
    decided: list[int] = []

    def failing(draft: Draft, event: Event, **values: Any) -> None:
        if isinstance(event, Finish):
            decided.append(len(event.numbers))
            assert 2 not in event.numbers, "a bug"
        happen(draft, event, **values)

    happen = Draft.happen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "happen", failing)
        for number in (1, 2, 3):
            executor.exit(AttemptName(number, 1), 0)
        rig.look(3)
    assert decided[0] == 3
    assert [rig.status(number) for number in (1, 2, 3)] == ["succeeded", "running", "succeeded"]
    assert "a bug" in rig.carrier.trouble
    rig.look(2)
    assert rig.status(2) == "succeeded"
    rig.die()


# ── refusals ──


def test_the_same_key_gives_the_same_job_and_another_job_is_refused(rig):
    assert rig.submit("k", gang=1) == 1
    assert rig.submit("k", gang=1) == 1
    rig = rig.again()
    assert rig.submit("k", gang=1) == 1
    with pytest.raises(KeyReusedError, match="job 1"):
        rig.submit("k", gang=2)
    assert rig.submit("l") == 2


def test_one_refused_command_does_not_touch_those_beside_it(rig):
    requests = [
        Request(lambda draft: commands.cancel(draft, 77, None, rig.store.job)),
        Request(lambda draft: commands.tick(draft)),
        Request(lambda draft: 1 // 0),
    ]
    good = [request.future for request in requests]
    rig.decider.decide(requests)
    assert isinstance(good[0].exception(), NotFoundError)
    assert good[1].result() is None
    assert isinstance(good[2].exception(), UnavailableError)


def test_what_cannot_be_is_refused(rig, executor):
    with pytest.raises(UsageError, match="did you mean 'v100'"):
        rig.submit(throughputs={"v10": 1.0})
    with pytest.raises(UsageError, match="absolute"):
        rig.submit(folder="data")
    with pytest.raises(UsageError, match="key"):
        rig.submit("ä" * 10)
    assert rig.world.last_number == 0
    rig.submit(throughputs={"v100": 2.0, "h100": 3.0})
    rig.look(2)
    for steps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="no number of steps"):
            rig.report(FIRST, steps)
    executor.exit(FIRST, 0)
    rig.look()
    for command in (commands.cancel, commands.pause, commands.resume):
        with pytest.raises(ConflictError, match="succeeded"):
            rig.change(command, 1)


def test_a_change_that_expects_another_version_is_refused(rig):
    rig.submit()
    version = rig.job(1).version
    rig.change(commands.pause, 1, version)
    assert rig.job(1).version > version
    with pytest.raises(ConflictError, match=f"not {version}"):
        rig.change(commands.resume, 1, version)
    rig.change(commands.resume, 1, rig.job(1).version)


def test_cancelling_twice_is_the_same_as_once(rig):
    rig.submit()
    rig.change(commands.cancel, 1)
    rig.change(commands.cancel, 1)
    rig.look(3)
    assert rig.status(1) == "cancelled"
    version = rig.job(1).version
    rig.change(commands.cancel, 1)
    assert rig.job(1).version == version


def test_an_old_attempt_can_neither_report_nor_commit(rig, executor):
    rig.submit()
    rig.look(2)
    old = rig.token(FIRST)
    executor.lose(FIRST)
    rig.look(2)
    assert rig.job(1).attempt == 2
    for token in (old, rig.token(AttemptName(1, 2)), ""):
        with pytest.raises(StaleAttemptError):
            rig.report(FIRST, 5.0, token=token)
        with pytest.raises(StaleAttemptError):
            rig.checkpoint(FIRST, 5.0, token=token or "x")
    with pytest.raises(StaleAttemptError):
        rig.report(AttemptName(1, 2), 5.0, token=old)
    assert rig.store.checkpoints(1) == []
    rig.report(AttemptName(1, 2), 5.0)


def test_a_waiting_attempt_cannot_report(rig, executor):
    executor.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.submit()
    rig.change(commands.cancel, 1)
    with pytest.raises(StaleAttemptError):
        rig.report(SECOND, 1.0)


def test_an_attempt_that_is_being_stopped_may_still_commit(rig, executor):
    executor.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.change(commands.pause, 1)
    rig.checkpoint(FIRST, 9.0)
    executor.exit(FIRST)
    rig.look()
    with pytest.raises(StaleAttemptError):
        rig.checkpoint(FIRST, 10.0)
    assert [one.step for one in rig.store.checkpoints(1)] == [9.0]


def test_a_report_corrects_the_measured_speed(rig):
    rig.submit(throughputs={"v100": 1.0}, total_steps=1000.0)
    rig.look(2)
    rig.time.now_s += 10.0
    lease = rig.report(FIRST, 50.0)
    assert lease.may_run
    assert lease.round_ends_s is not None
    assert rig.world.state.jobs.steps_per_s[0, 0] == pytest.approx(3.0)
    version = rig.job(1).version
    rig.time.now_s += 10.0
    rig.report(FIRST, 60.0)
    assert (rig.job(1).done_steps, rig.job(1).version) == (60.0, version)


# ── restarts and failures ──


def test_a_restart_goes_on_where_the_last_daemon_was_killed(rig, executor):
    rig.submit()
    rig.look(2)
    executor.exit(FIRST, 0)
    rig = rig.again()
    assert rig.status(1) == "running"
    rig.look(2)
    assert rig.status(1) == "succeeded"


def test_new_rules_kinds_and_weights_of_a_restart_hold(rig, executor):
    rig.submit(team="a", throughputs={"v100": 1.0, "a100": 8.0})
    rig.submit()
    executor.devices = (*executor.devices, *fleet_devices(a100=1))
    rig = rig.again(rules=dataclasses.replace(RULES, policy="fifo"), kinds=("v100", "a100"),
        team_weights={"a": 3.0},
    )  # fmt: skip
    rig.look(2)
    state = rig.world.state
    assert state.kinds == ("v100", "k80", "a100")
    np.testing.assert_array_equal(state.jobs.steps_per_s, [[1.0, 0.0, 8.0], [1.0, 1.0, 1.0]])
    assert (state.rules.policy, state.team_weight.tolist()) == ("fifo", [1.0, 3.0])
    rig.later(61.0)
    rig.look(3)
    assert {rig.status(1), rig.status(2)} == {"running"}


def test_an_unknown_attempt_that_runs_is_killed(rig, executor):
    rig.submit()
    rig.look(2)
    stray = dataclasses.replace(
        executor.processes[FIRST].assignment, name=AttemptName(9, 1), devices=("other",)
    )
    executor.start(stray)
    rig.look(3)
    assert ("kill", stray.name) in executor.history
    assert stray.name not in executor.processes
    assert executor.running() == [FIRST]


def test_a_commit_that_fails_changes_nothing_and_outcomes_are_tried_again(rig, executor):
    rig.submit()
    rig.look(2)
    executor.exit(FIRST, 0)

    def full(moment: str) -> None:
        if moment == "before commit":
            raise UnavailableError("the disk is full")

    rig._on_commit, before = full, rig._on_commit
    world = rig.world
    with pytest.raises(RunError, match="full"):
        rig.submit("k")
    rig.look(3)
    assert rig.world is world
    assert "full" in rig.carrier.trouble
    rig._on_commit = before
    assert rig.submit("k") == 2
    rig.look(2)
    assert (rig.status(1), rig.status(2)) == ("succeeded", "running")


def test_a_witness_that_fails_ends_all_deciding(rig, executor):
    def broken(moment: str) -> None:
        if moment == "before witness":
            raise OSError(5, "input/output error")

    rig._on_commit = broken
    with pytest.raises(UnavailableError, match="witness"):
        rig.submit("k")
    rig._on_commit = lambda moment: None
    with pytest.raises(UnavailableError, match="witness"):
        rig.submit("k")
    rig = rig.again()
    assert rig.submit("k") == 1, "it was stored after all"


def test_an_engine_that_refuses_to_start_is_asked_again_then_the_attempt_is_lost(rig, executor):
    calls: list[str] = []

    def refuse(call: str) -> None:
        calls.append(call)
        if call == "start":
            raise RunError("no such node")

    executor.on_call = refuse
    rig.submit()
    rig.look(3)
    assert (calls.count("start"), rig.carrier.trouble) == (1, "no such node"), "not at once"
    for _ in range(4):
        rig.time.now_s += 8.0
        assert (rig.status(1), rig.job(1).failures) == ("starting", 0)
        rig.look()
    assert calls.count("start") == 5
    rig.look(2)
    assert rig.job(1).failures == 1
    assert "no such node" in rig.job(1).message
    executor.on_call = None
    rig.look(3)
    assert rig.status(1) == "running"


def test_an_engine_that_is_away_changes_nothing(rig, executor):
    rig.submit()
    rig.look(2)

    def away(call: str) -> None:
        raise RunError("the engine is away")

    executor.on_call = away
    rig.change(commands.cancel, 1)
    rig.look(3)
    assert rig.status(1) == "stopping"
    assert rig.carrier.trouble == "the engine is away"
    executor.on_call = None
    rig.look(2)
    assert (rig.status(1), rig.carrier.trouble) == ("cancelled", "")


def test_a_store_that_contradicts_itself_is_refused(rig):
    rig.submit()
    rig.look(2)
    attempt = rig.store.attempts(1)[0]
    world = rig.world
    rig.store.commit(
        Batch(
            state=world.state,
            attempts=[dataclasses.replace(attempt, devices=("v100-9",))],
            first_new_number=2,
            last_number=1,
            last_sequence=world.last_sequence,
            num_attempts=1,
        )
    )
    with pytest.raises(InputFileError, match="other devices"):
        rig.again()


def test_time_never_goes_back(tmp_path, rig):
    wall, monotonic = Time(), Time()
    clock = Clock(2_000_000.0, wall_s=wall, monotonic_s=monotonic)
    assert clock.now_s() == 2_000_000.0
    wall.now_s -= 1e9
    monotonic.now_s += 1.5
    assert clock.now_s() == 2_000_001.5
    rig.submit()
    rig.time.now_s -= 5000.0
    moved = rig.again()
    moved.submit()
    assert moved.job(2).submitted_s >= moved.job(1).submitted_s


def test_a_job_that_the_policy_cannot_serve_is_refused_at_once(rig):
    rig.submit(total_steps=100.0)
    strict = rig.again(rules=dataclasses.replace(RULES, policy="finish-time-fairness"))
    strict.look()
    with pytest.raises(UsageError, match="needs the remaining steps"):
        strict.submit()
    strict.submit(total_steps=5.0)
    strict.later(61.0)
    loose = strict.again()
    loose.submit()
    with pytest.raises(UsageError, match="needs the remaining steps of job '3'"):
        loose.again(rules=dataclasses.replace(RULES, policy="finish-time-fairness"))


def test_a_fleet_without_any_kind_of_device_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no devices"):
        Rig(tmp_path, FakeExecutor(()), Time(), kinds=())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_rehearsed(policy):
    for mechanism in MECHANISMS:
        rehearse_day(Rules(policy=policy, mechanism=mechanism), KINDS)


def test_teams_grow_by_name(rig):
    rig.submit(team="red")
    rig.submit(team="blue")
    rig.submit(team="red")
    state = rig.world.state
    assert state.teams == ("", "red", "blue")
    assert state.jobs.rows["team"].tolist() == [1, 2, 1]


def test_rules_of_the_first_start_hold(tmp_path):
    rig = Rig(tmp_path, FakeExecutor(()), Time(), rules=Rules(policy="fifo"))
    assert rig.world.state.rules.policy == "fifo"
    rig.submit()
    assert rig.status(1) == "queued"
    rig.die()
    with pytest.raises(sqlite3.ProgrammingError):
        rig.store._writer.execute("SELECT 1")
