"""Things that happen in one instant: changes of one batch, an end and a stop, a clock being set."""

from __future__ import annotations

import os
import signal

import pytest
from service.local_attempts import (
    NAME,
    WAITS,
    assignment,
    python,
    supervisor_of,
    wait_for_end,
    wait_for_text,
)
from service.violations import violations

from hocket.base.errors import UsageError
from hocket.service.daemon import commands, observations
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.decider import Request
from hocket.service.errors import ConflictError
from hocket.service.executors.executor import EXITED, LOST, RUNNING, STARTING, AttemptName, Status

FIRST = AttemptName(1, 1)
OBEYS_WELL = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{WAITS}"


def change_of(rig, change, number, version=None) -> Request:
    find_job = rig.store.job
    return Request(
        lambda transaction: commands.change_job(transaction, change, number, version, find_job)
    )


def test_of_two_changes_that_expect_one_version_the_second_is_refused(rig):
    """Also where both are decided in one batch, when neither is committed yet."""
    rig.submit()
    version = rig.job(1).version
    first = change_of(rig, "pause", 1, version)
    second = change_of(rig, "resume", 1, version)
    third = change_of(rig, "cancel", 1, version + 1)
    rig.decider.decide([first, second, third])
    first.future.result()
    with pytest.raises(ConflictError, match=f"at version {version + 1}, not {version}"):
        second.future.result()
    third.future.result()
    rig.look(2)
    assert rig.status(1) == "cancelled"


def test_a_command_that_is_refused_half_way_leaves_nothing_behind(rig):
    number = rig.submit()

    def breaks(transaction) -> None:
        commands.change_job(transaction, "pause", number, None, rig.store.job)
        raise UsageError("and then it does not fit")

    good, bad = change_of(rig, "pause", rig.submit()), Request(breaks)
    rig.decider.decide([good, bad])
    good.future.result()
    with pytest.raises(UsageError, match="does not fit"):
        bad.future.result()
    assert rig.status(number) == "starting"
    assert rig.status(2) == "paused"
    assert violations(rig.service_state) == []


# ── the end of a command and its stop ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stop", ["pause", "cancel", None])
@pytest.mark.parametrize("was_asked", [False, True])
def test_a_job_that_was_done_before_it_was_asked_to_stop_is_done(rig, engine, stop, was_asked):
    engine.are_stubborn = True
    rig.submit()
    rig.look(2)
    if stop is None:
        rig.ask(observations.silent, name=FIRST, silence_s=1.0)
    else:
        rig.change(stop, 1)
    assert rig.service_state.attempt(FIRST).stopping_since_s is not None
    engine.exit(FIRST, 0)
    status = Status(name=FIRST, phase=EXITED, exit_code=0, was_asked=was_asked)
    rig.ask(observations.ended, statuses=[status])
    if stop == "cancel":
        assert rig.status(1) == "cancelled"
    elif not was_asked:
        assert rig.status(1) == "succeeded"
        assert rig.store.attempts(1)[0].outcome == "finished"
    else:
        assert rig.status(1) == ("starting" if stop is None else "paused")
    rig.look(2)
    status = rig.status(1)
    assert rig.again().status(1) == status


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_that_left_because_its_report_was_answered_so_is_not_done(rig, engine, restarts):
    """The answer may be quicker than the signal, of which the executor then knows nothing."""
    engine.are_stubborn = True
    rig.submit(total_steps=100)
    rig.look(2)
    rig.change("pause", 1)
    assert not rig.report(FIRST, 30.0).may_run
    if restarts:
        rig = rig.again()
    engine.exit(FIRST, 0)
    status = Status(name=FIRST, phase=EXITED, exit_code=0, was_asked=False)
    rig.ask(observations.ended, statuses=[status])
    assert (rig.status(1), rig.job(1).done_steps) == ("paused", 30.0)
    rig.change("resume", 1)
    rig.look(2)
    assert (rig.status(1), rig.job(1).attempt) == ("running", 2)


def test_a_command_that_ended_before_its_stop_was_not_asked(executor, tmp_path):
    executor.start(assignment(tmp_path, *python("pass")))
    result = tmp_path / "attempts" / str(NAME) / "result.json"
    wait_for_end(executor)
    assert result.exists()
    executor.stop(NAME, 5.0)
    status = wait_for_end(executor)
    assert (status.exit_code, status.was_asked) == (0, False)


def test_a_command_that_obeys_with_exit_code_0_was_asked(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(OBEYS_WELL)))
    wait_for_text(tmp_path / "log")
    executor.stop(NAME, 20.0)
    status = wait_for_end(executor)
    assert (status.exit_code, status.was_asked) == (0, True)


def test_a_command_that_obeys_a_stranger_is_not_done(executor, tmp_path):
    """A supervisor may be told to end by others than the fleet, as by Slurm at a time limit."""
    executor.start(assignment(tmp_path, *python(OBEYS_WELL)))
    wait_for_text(tmp_path / "log")
    os.kill(supervisor_of(tmp_path), signal.SIGTERM)
    status = wait_for_end(executor)
    assert (status.phase, status.detail) == (LOST, "its supervisor was stopped from outside")


def test_a_command_that_is_done_is_not_asked_for_the_sake_of_what_it_left(executor, tmp_path):
    """What outlives a command is told to end; the command itself was done."""
    code = "import subprocess; subprocess.Popen(['sleep', '60'])"
    executor.start(assignment(tmp_path, *python(code), grace_s=0.2))
    status = wait_for_end(executor)
    assert (status.exit_code, status.was_asked) == (0, False)


def test_an_attempt_that_waits_in_the_queue_of_its_engine_is_not_silent(rig, engine):
    rig.submit(silence_s=60.0)
    rig.look()
    engine.processes[FIRST].phase = STARTING
    rig.look(2)
    rig.later(600.0)
    rig.look(2)
    assert (rig.status(1), rig.job(1).failures) == ("starting", 0)
    engine.processes[FIRST].phase = RUNNING
    rig.look(2)
    rig.later(59.0)
    rig.look()
    assert rig.job(1).failures == 0
    rig.later(2.0)
    rig.look()
    assert rig.job(1).failures == 1


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("jump_s", [-1e9, -3600.0, 3600.0, 1e9])
def test_nobody_notices_that_the_wall_clock_was_set(jump_s):
    """Rounds, graces and silences count with the monotonic clock alone."""
    wall_s = [2e9]
    monotonic_s = [5.0]
    clock = Clock(0.0, wall_s=lambda: wall_s[0], monotonic_s=lambda: monotonic_s[0])
    before_s = clock.now_s()
    wall_s[0] += jump_s
    monotonic_s[0] += 2.0
    assert clock.now_s() == before_s + 2.0
    again = Clock(clock.now_s(), wall_s=lambda: wall_s[0], monotonic_s=lambda: 0.5)
    assert again.now_s() == max(before_s + 2.0, wall_s[0]), "a restart never goes back either"
