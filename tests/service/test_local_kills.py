"""What is killed, halted or daemonized: nothing outlives its attempt, no stranger is hit."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from patience import wait_until
from service.local_attempts import (
    NAME,
    OBEYS,
    REFUSES,
    WAITS,
    WITH_GRANDCHILD,
    assignment,
    executor_in,
    folder_of,
    is_alive,
    left_of,
    pids,
    python,
    status_of,
    stop_here,
    supervisor_of,
    wait_for_end,
    wait_for_phase,
    wait_for_text,
)

from hocket.processes import system
from hocket.service.executors import attempt_folder, local, supervisor
from hocket.service.executors.executor import EXITED, LOST, RUNNING, AttemptName


def test_a_result_counts_only_once_the_supervisor_is_gone(executor, tmp_path):
    """A job of the same user may write a result, and put a free lock in place of the held one."""
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    folder, pid = folder_of(tmp_path), supervisor_of(tmp_path)
    (folder / "lock").rename(folder / "old-lock")
    (folder / "lock").touch()
    attempt_folder.write_result(folder, attempt_folder.Result(0, "forged", was_asked=False))
    attempt_folder.write_json(folder / "begun.json", {"pid": 1, "start_ticks": 0, "boot": "none"})
    assert status_of(executor).phase == RUNNING
    later = executor_in(tmp_path)
    assert status_of(later).phase == RUNNING
    os.kill(pid, signal.SIGKILL)
    wait_for_end(later)
    wait_until(lambda: left_of(tmp_path) == [])


def test_a_supervisor_that_is_killed_takes_everything_with_it(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(WITH_GRANDCHILD + REFUSES)))
    everything = pids(tmp_path / "pids", 2)
    wait_for_text(tmp_path / "log", "ready")
    os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    status = wait_for_phase(executor, LOST, EXITED)
    assert status.phase == LOST
    assert status.exit_code is None
    assert not any(is_alive(pid) for pid in everything)
    executor.start(assignment(tmp_path, "touch", "ran"))
    assert status_of(executor).phase == LOST
    assert not (tmp_path / "ran").exists()


def test_commands_die_with_their_supervisor_though_nobody_looks(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(REFUSES)))
    wait_for_text(tmp_path / "log", "ready")
    (command,) = left_of(tmp_path)
    os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    wait_until(lambda: not is_alive(command.pid), "the command is gone")
    assert not left_of(tmp_path)


def test_a_command_that_is_killed_from_outside_has_ended(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(WITH_GRANDCHILD + WAITS)))
    command, grandchild = pids(tmp_path / "pids", 2)
    os.kill(command, signal.SIGKILL)
    assert wait_for_end(executor).exit_code == -9
    assert not is_alive(grandchild)


def test_a_supervisor_that_is_halted_is_killed_when_its_time_is_up(executor, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "SUPERVISOR_DELAY_S", 0.2)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    os.kill(supervisor_of(tmp_path), signal.SIGSTOP)
    executor.stop(NAME, 0.1)
    # Asked again with more time, it has what it was given first.
    executor.stop(NAME, 600.0)
    assert wait_for_end(executor).phase == LOST
    assert not left_of(tmp_path)


def test_a_number_that_was_used_again_is_left_alone(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        found = system.process(stranger.pid)
        assert not system.send(found._replace(start_ticks=found.start_ticks - 1), signal.SIGKILL)
        # The same through the files of an attempt whose supervisor had this number before.
        executor = executor_in(tmp_path)
        folder_of(tmp_path).mkdir()
        begun = {"pid": stranger.pid, "start_ticks": found.start_ticks - 1}
        path = folder_of(tmp_path) / attempt_folder.BEGUN
        attempt_folder.write_json(path, {**begun, "boot": system.boot()})
        executor.kill(NAME)
        begun["start_ticks"] += 1
        # Not even where the job wrote the right moment: it is no supervisor of this attempt.
        attempt_folder.write_json(path, {**begun, "boot": system.boot()})
        executor.kill(NAME)
        attempt_folder.write_json(path, {**begun, "boot": "an earlier one"})
        executor.kill(NAME)
        assert wait_for_end(executor).phase == LOST
        assert stranger.poll() is None
        assert system.send(found, signal.SIGKILL)
        assert stranger.wait() == -signal.SIGKILL
        assert not system.send(found, signal.SIGKILL)
    finally:
        stranger.kill()
        stranger.wait()


DAEMONIZES = """
import os, signal, time
first = os.fork()
if first == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.clear()
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if HALTS:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
os.waitpid(first, 0)
while not os.path.exists("pids") or not os.path.getsize("pids"):
    time.sleep(0.01)
print("ready", flush=True)
"""


@pytest.mark.parametrize("halts", [False, True])
@pytest.mark.parametrize("end", ["by itself", "stop", "kill -9"])
def test_no_daemon_outlives_its_attempt(executor, tmp_path, halts, end):
    """Though it left its session, lost its parents, ignores SIGTERM and perhaps is halted."""
    code = DAEMONIZES.replace("HALTS", str(halts))
    waits = "" if end == "by itself" else "time.sleep(60)"
    executor.start(assignment(tmp_path, *python(code + waits), grace_s=0.3))
    (daemon,) = pids(tmp_path / "pids", 1)
    wait_for_text(tmp_path / "log", "ready")
    if end == "stop":
        executor.stop(NAME, 0.3)
    if end == "kill -9":
        os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    status = wait_for_end(executor)
    assert not is_alive(daemon)
    expected = {"by itself": (EXITED, 0), "stop": (EXITED, -15), "kill -9": (LOST, None)}
    assert (status.phase, status.exit_code) == expected[end]


def test_what_was_given_up_ends_although_nobody_can_tell_it_to(executor, tmp_path):
    """As on a node that was cut off, whose attempt was forgotten when it comes back."""
    executor.start(assignment(tmp_path, *python(REFUSES)))
    wait_for_text(tmp_path / "log", "ready")
    everything = [supervisor_of(tmp_path), *(one.pid for one in left_of(tmp_path))]
    shutil.rmtree(folder_of(tmp_path))
    wait_until(lambda: not any(is_alive(pid) for pid in everything), "nothing runs")
    assert not left_of(tmp_path)


def test_a_number_that_is_used_again_is_no_second_end_of_a_command(monkeypatch):
    gang = supervisor._Gang()
    gang.rank_of[5] = 0
    gang._handles.append(argparse.Namespace(returncode=None))
    told = iter([(5, 0), (5, 256), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(told))
    gang.reap()
    assert gang.ended == [(0, 0)]
    assert not gang.rank_of


def test_a_halted_supervisor_is_fenced_though_nobody_asked_it_to_end(
    executor, tmp_path, monkeypatch
):
    executor.start(assignment(tmp_path, *python(WAITS)))
    wait_for_text(tmp_path / "log", "ready")
    first = attempt_folder.last_beat(folder_of(tmp_path))
    wait_until(
        lambda: attempt_folder.last_beat(folder_of(tmp_path)) > first, "it shows that it lives"
    )
    stop_here(supervisor_of(tmp_path))
    monkeypatch.setattr(local, "SILENCE_S", 0.5)
    status = wait_for_end(executor)
    assert status.phase == LOST
    assert "supervisor died" in status.detail
    assert left_of(tmp_path) == []


def test_one_long_pause_of_the_daemon_fences_nobody(executor, tmp_path, monkeypatch):
    executor.start(assignment(tmp_path, *python(WAITS)))
    wait_for_text(tmp_path / "log", "ready")
    now_s, killed = 0.0, []
    monkeypatch.setattr(local.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(executor, "_signal_supervisor", lambda *_: killed.append(now_s))
    for pause_s in (0.0, 1e4, 1e4):
        now_s += pause_s
        assert status_of(executor).phase == RUNNING
    assert not killed
    # Neither does one who shows that he lives, however long it takes.
    for _ in range(100):
        now_s += local.MAX_LOOK_S
        attempt_folder.beat(folder_of(tmp_path))
        assert status_of(executor).phase == RUNNING
    assert not killed


def test_a_result_counts_only_once_the_supervisor_has_let_go(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    attempt_folder.write_result(folder_of(tmp_path), attempt_folder.Result(0, ""))
    assert status_of(executor).phase == RUNNING
    executor.stop(NAME, 20.0)
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 4)


FORGED = """
import json, pathlib, sys
victim = pathlib.Path(sys.argv[1])
for name in ("assignment.json", "cgroup.json"):
    if (victim / name).exists():
        (pathlib.Path(sys.argv[2]) / name).write_text((victim / name).read_text())
"""


@pytest.mark.parametrize("is_plain_file", [False, True])
def test_files_of_another_attempt_cost_it_nothing(executor, tmp_path, is_plain_file):
    """A job copies what names another's processes, or names any number, and its supervisor dies."""
    victim = AttemptName(8, 1)
    executor.start(
        assignment(tmp_path, *python(WAITS), name=victim, devices=("v100-1",),
                   log_file=tmp_path / "victim")
    )  # fmt: skip
    wait_for_text(tmp_path / "victim", "ready")
    command = (*python(FORGED + WAITS), str(folder_of(tmp_path, victim)), str(folder_of(tmp_path)))
    executor.start(assignment(tmp_path, *command))
    wait_for_text(tmp_path / "log", "ready")
    if is_plain_file:
        fake = tmp_path / "group"
        fake.mkdir()
        (fake / "cgroup.procs").write_text(
            "".join(f"{one.pid}\n" for one in left_of(tmp_path, victim))
        )
        content = {"version": 2, "folders": {"memory": str(fake)}}
        (folder_of(tmp_path) / "cgroup.json").write_text(json.dumps(content))
    os.kill(supervisor_of(tmp_path), signal.SIGKILL)
    assert wait_for_end(executor).phase == LOST
    assert left_of(tmp_path) == []
    assert status_of(executor, victim).phase == RUNNING
    assert left_of(tmp_path, victim)
