"""What a daemon refuses, and how it goes on after restarts and failures."""

from __future__ import annotations

import dataclasses
import sqlite3

import numpy as np
import pytest
from service.daemon_rig import RULES, Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.base.errors import RunError, UsageError
from hocket.fleet.policies import POLICIES
from hocket.fleet.rounds.state import Rules
from hocket.service.daemon import commands
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.decider import Request
from hocket.service.daemon.transaction import Transaction
from hocket.service.errors import (
    ConflictError,
    KeyReusedError,
    NotFoundError,
    StaleAttemptError,
    UnavailableError,
)
from hocket.service.executors.executor import AttemptName

FIRST, SECOND = AttemptName(1, 1), AttemptName(2, 1)


# ── refusals ──


def test_the_same_key_gives_the_same_job_and_another_job_is_refused(rig):
    assert rig.submit("k", gang=1) == 1
    assert rig.submit("k", gang=1) == 1
    rig = rig.again()
    assert rig.submit("k", gang=1) == 1
    with pytest.raises(KeyReusedError, match="job 1"):
        rig.submit("k", gang=2)
    assert rig.submit("l") == 2
    assert [rig.submit("k", owner=owner, gang=2) for owner in ("ann", "bob", "ann")] == [3, 4, 3]


def test_one_refused_command_does_not_touch_those_beside_it(rig):
    requests = [
        Request(
            lambda transaction: commands.change_job(transaction, "cancel", 77, None, rig.store.job)
        ),
        Request(lambda transaction: commands.tick(transaction)),
        Request(lambda transaction: 1 // 0),
    ]
    good = [request.future for request in requests]
    rig.decider.decide(requests)
    assert isinstance(good[0].exception(), NotFoundError)
    assert good[1].result() is None
    assert isinstance(good[2].exception(), UnavailableError)


def test_what_cannot_be_is_refused(rig, engine):
    with pytest.raises(UsageError, match="did you mean 'v100'"):
        rig.submit(throughputs={"v10": 1.0})
    with pytest.raises(UsageError, match="absolute"):
        rig.submit(folder="data")
    assert rig.service_state.last_number == 0
    rig.submit(throughputs={"v100": 2.0, "h100": 3.0})
    rig.look(2)
    for steps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="no number of steps"):
            rig.report(FIRST, steps)
    engine.exit(FIRST, 0)
    rig.look()
    for command in ("cancel", "pause", "resume"):
        with pytest.raises(ConflictError, match="succeeded"):
            rig.change(command, 1)


def test_wrong_steps_of_an_attempt_that_is_being_stopped_are_refused(rig, engine):
    """The scheduler hears nothing of such an attempt, so it refuses nothing either."""
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.report(FIRST, 5.0)
    rig.change("pause", 1)
    assert rig.status(1) == "stopping"
    for steps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="no number of steps"):
            rig.report(FIRST, steps)
        with pytest.raises(UsageError, match="no number of steps"):
            rig.checkpoint(FIRST, steps)
    assert rig.job(1).done_steps == 5.0
    assert 1 not in rig.service_state.checkpoints


def test_a_change_that_expects_another_version_is_refused(rig):
    rig.submit()
    version = rig.job(1).version
    rig.change("pause", 1, version)
    assert rig.job(1).version > version
    with pytest.raises(ConflictError, match=f"not {version}"):
        rig.change("resume", 1, version)
    rig.change("resume", 1, rig.job(1).version)


def test_cancelling_twice_is_the_same_as_once(rig):
    rig.submit()
    rig.change("cancel", 1)
    rig.change("cancel", 1)
    rig.look(3)
    assert rig.status(1) == "cancelled"
    version = rig.job(1).version
    rig.change("cancel", 1)
    assert rig.job(1).version == version


def test_an_old_attempt_can_neither_report_nor_commit(rig, engine):
    rig.submit()
    rig.look(2)
    old = rig.token(FIRST)
    engine.lose(FIRST)
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


def test_a_waiting_attempt_cannot_report(rig, engine):
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.submit()
    rig.change("cancel", 1)
    with pytest.raises(StaleAttemptError):
        rig.report(SECOND, 1.0)


def test_an_attempt_that_is_being_stopped_may_still_commit(rig, engine):
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    rig.change("pause", 1)
    rig.checkpoint(FIRST, 9.0)
    engine.exit(FIRST)
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
    assert rig.service_state.state.jobs.steps_per_s[0, 0] == pytest.approx(3.0)
    version = rig.job(1).version
    rig.time.now_s += 10.0
    rig.report(FIRST, 60.0)
    assert (rig.job(1).done_steps, rig.job(1).version) == (60.0, version)


# ── restarts and failures ──


def test_a_restart_goes_on_where_the_last_daemon_was_killed(rig, engine):
    rig.submit()
    rig.look(2)
    engine.exit(FIRST, 0)
    rig = rig.again()
    assert rig.status(1) == "running"
    rig.look(2)
    assert rig.status(1) == "succeeded"


def test_new_rules_types_and_weights_of_a_restart_hold(rig, engine):
    rig.submit(team="a", throughputs={"v100": 1.0, "a100": 8.0})
    rig.submit()
    engine.devices = (*engine.devices, *fleet_devices(a100=1))
    rig = rig.again(rules=dataclasses.replace(RULES, policy="fifo"), device_types=("v100", "a100"),
        team_weights={"a": 3.0},
    )  # fmt: skip
    rig.look(2)
    state = rig.service_state.state
    assert state.device_types == ("v100", "k80", "a100")
    np.testing.assert_array_equal(state.jobs.steps_per_s, [[1.0, 0.0, 8.0], [1.0, 1.0, 1.0]])
    assert (state.rules.policy, state.team_weight.tolist()) == ("fifo", [1.0, 3.0])
    rig.later(61.0)
    rig.look(3)
    assert {rig.status(1), rig.status(2)} == {"running"}


def test_an_unknown_attempt_that_runs_is_killed(rig, engine):
    rig.submit()
    rig.look(2)
    first = engine.processes[FIRST].assignment
    stray = first._replace(name=AttemptName(9, 1), devices=("other",))
    engine.start(stray)
    rig.look(3)
    assert ("kill", stray.name) in engine.history
    assert stray.name not in engine.processes
    assert engine.running() == [FIRST]


def test_a_commit_that_fails_changes_nothing_and_outcomes_are_tried_again(rig, engine):
    rig.submit()
    rig.look(2)
    engine.exit(FIRST, 0)

    def full(moment: str) -> None:
        if moment == "before commit":
            raise UnavailableError("the disk is full")

    rig._on_commit, before = full, rig._on_commit
    service_state = rig.service_state
    with pytest.raises(RunError, match="full"):
        rig.submit("k")
    rig.look(3)
    assert rig.service_state is service_state
    assert "full" in rig.reconciler.trouble
    rig._on_commit = before
    assert rig.submit("k") == 2
    rig.look(2)
    assert (rig.status(1), rig.status(2)) == ("succeeded", "running")


def test_an_engine_that_refuses_to_start_is_asked_again_then_the_attempt_is_lost(rig, engine):
    calls: list[str] = []

    def refuse(call: str) -> None:
        calls.append(call)
        if call == "start":
            raise RunError("no such node")

    engine.on_call = refuse
    rig.submit()
    rig.look(3)
    assert (calls.count("start"), rig.reconciler.trouble) == (1, "no such node"), "not at once"
    for _ in range(4):
        rig.time.now_s += 8.0
        assert (rig.status(1), rig.job(1).failures) == ("starting", 0)
        rig.look()
    assert calls.count("start") == 5
    rig.look(2)
    assert rig.job(1).failures == 1
    assert "no such node" in rig.job(1).message
    engine.on_call = None
    rig.look(3)
    assert rig.status(1) == "running"


def test_an_engine_that_is_away_changes_nothing(rig, engine):
    rig.submit()
    rig.look(2)

    def away(call: str) -> None:
        raise RunError("the engine is away")

    engine.on_call = away
    rig.change("cancel", 1)
    rig.look(3)
    assert rig.status(1) == "stopping"
    assert rig.reconciler.trouble == "the engine is away"
    engine.on_call = None
    rig.look(2)
    assert (rig.status(1), rig.reconciler.trouble) == ("cancelled", "")


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


def test_a_fleet_without_any_type_of_device_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no devices"):
        Rig(tmp_path, FakeExecutor(()), Time(), device_types=())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_job_at_once(tmp_path, policy):
    engine = FakeExecutor(fleet_devices(v100=1))
    rig = Rig(tmp_path, engine, Time(), rules=Rules(policy=policy))
    rig.look()
    rig.submit(total_steps=1e6, deadline_s=1e6)
    assert rig.status(1) == "starting"
    rig.die()


def test_teams_grow_by_name(rig):
    rig.submit(team="red")
    rig.submit(team="blue")
    rig.submit(team="red")
    state = rig.service_state.state
    assert state.teams == ("", "red", "blue")
    assert state.jobs.rows["team"].tolist() == [1, 2, 1]


def test_rules_of_the_first_start_hold(tmp_path):
    rig = Rig(tmp_path, FakeExecutor(()), Time(), rules=Rules(policy="fifo"))
    assert rig.service_state.state.rules.policy == "fifo"
    rig.submit()
    assert rig.status(1) == "queued"
    rig.die()
    with pytest.raises(sqlite3.ProgrammingError):
        rig.store._writer.execute("SELECT 1")


def test_a_command_that_is_refused_half_way_leaves_nothing_of_itself(rig):
    def half(transaction: Transaction) -> None:
        transaction.note("half")
        raise UsageError("not so")

    requests = [Request(half), Request(lambda transaction: transaction.note("whole"))]
    rig.decider.decide(requests)
    with pytest.raises(UsageError, match="not so"):
        requests[0].future.result()
    requests[1].future.result()
    kinds = [event.kind for event in rig.store.events()]
    assert "half" not in kinds
    assert "whole" in kinds


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_last_one(rig):
    """A training that saves again has reason to: the file before may be half of it."""
    rig.submit()
    rig.look(2)
    values = {"name": FIRST, "token": rig.token(FIRST), "step": 5.0}
    for path in ("/first", "/second"):
        assert rig.ask(commands.commit_checkpoint, path=path, **values).path == path
    assert rig.service_state.checkpoints[1].path == "/second"
