"""A name runs once, whoever asks for it, whenever, and whatever became of its files."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import pytest
from patience import wait_until
from service.local_attempts import (
    NAME,
    OBEYS,
    REFUSES,
    WITH_GRANDCHILD,
    assignment,
    executor_in,
    folder_of,
    is_alive,
    left_of,
    python,
    status_of,
    supervisor_of,
    wait_for_end,
    wait_for_phase,
    wait_for_text,
)

from hocket.base.errors import RunError
from hocket.service.executors import attempt_folder, local
from hocket.service.executors.executor import EXITED, LOST, RUNNING, STARTING, AttemptName


def test_many_starts_run_once(executor, tmp_path):
    other = executor_in(tmp_path)
    once = assignment(tmp_path, *python("open('runs', 'a').write('x'); import time; time.sleep(1)"))
    for one in (executor, other, executor):
        one.start(once)
    folder = str(folder_of(tmp_path))
    by_hand = [
        subprocess.Popen([sys.executable, "-m", "hocket.service.executors.supervisor", folder])
        for _ in range(2)
    ]
    assert wait_for_end(other).exit_code == 0
    assert [one.wait() for one in by_hand] == [0, 0]
    executor.start(once)
    executor.poll()
    assert (tmp_path / "runs").read_text() == "x"
    other.close()


def test_a_new_executor_sees_what_an_old_one_started(executor, tmp_path):
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    executor.close()
    adopted = executor_in(tmp_path)
    assert wait_for_phase(adopted, RUNNING)
    adopted.stop(NAME, 20.0)
    assert wait_for_end(adopted).exit_code == 4
    assert wait_for_end(executor_in(tmp_path)).exit_code == 4
    # The process that started it lives on: no zombie may stay with it.
    supervisor = supervisor_of(tmp_path)
    wait_until(lambda: not os.path.exists(f"/proc/{supervisor}"), "the supervisor is waited for")


def test_a_start_that_a_daemon_did_not_survive_is_carried_on(executor, tmp_path):
    folder_of(tmp_path).mkdir()
    attempt_folder.write_assignment(folder_of(tmp_path), assignment(tmp_path, "touch", "ran"))
    assert status_of(executor).phase == STARTING
    assert wait_for_end(executor).exit_code == 0
    assert (tmp_path / "ran").exists()


def test_a_supervisor_that_cannot_start_is_told(executor, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    executor.start(assignment(tmp_path, "touch", "ran"))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, 126)
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    other = AttemptName(8, 1)
    with pytest.raises(RunError, match="No such file"):
        executor.start(assignment(tmp_path, "touch", "ran", name=other))
    assert wait_for_end(executor, other).exit_code == 126
    assert not (tmp_path / "ran").exists()


def test_a_forgotten_attempt_is_not_told_and_its_name_stays_refused(executor, tmp_path):
    executor.start(assignment(tmp_path, "true"))
    executor.forget(NAME)
    wait_for_end(executor)
    executor.forget(NAME)
    assert not executor.poll().attempts
    assert not folder_of(tmp_path).exists()
    executor.start(assignment(tmp_path, "touch", "ran"))
    assert status_of(executor).exit_code == 126
    executor.start(assignment(tmp_path, "true", name=NAME._replace(attempt=NAME.attempt + 1)))
    assert wait_for_end(executor, NAME._replace(attempt=NAME.attempt + 1)).exit_code == 0
    assert not (tmp_path / "ran").exists()


def test_what_was_set_aside_is_ended_and_disturbs_no_later_attempt(executor, tmp_path):
    """Also where a supervisor was killed before, and only what it ran is left."""
    orphaned = AttemptName(8, 1)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    executor.start(
        assignment(
            tmp_path,
            *python(WITH_GRANDCHILD + REFUSES),
            name=orphaned,
            log_file=tmp_path / "orphaned",
        )
    )
    wait_for_text(tmp_path / "log", "ready")
    wait_for_text(tmp_path / "orphaned", "ready")
    old = [one.pid for name in (NAME, orphaned) for one in left_of(tmp_path, name)]
    assert len(old) == 3
    os.kill(supervisor_of(tmp_path, orphaned), signal.SIGKILL)
    executor.close()
    (tmp_path / "damaged-1").mkdir()
    os.rename(tmp_path / "attempts", tmp_path / "damaged-1" / "attempts")

    fresh = executor_in(tmp_path)
    fresh.start(assignment(tmp_path, *python(OBEYS), log_file=tmp_path / "fresh"))
    wait_for_text(tmp_path / "fresh", "ready")
    local.end_set_aside(tmp_path)
    assert not any(is_alive(pid) for pid in old)
    assert status_of(fresh).phase == RUNNING
    fresh.kill(NAME)
    assert wait_for_end(fresh).phase == EXITED
    fresh.close()


@pytest.mark.parametrize("file", [attempt_folder.RESULT, attempt_folder.STOP, attempt_folder.BEGUN])
def test_damaged_files_end_in_a_reason(executor, tmp_path, file):
    executor.start(assignment(tmp_path, "true"))
    wait_for_end(executor)
    (folder_of(tmp_path) / attempt_folder.RESULT).unlink()
    (folder_of(tmp_path) / file).write_text("{ha")
    assert wait_for_end(executor).phase == LOST
    executor.forget(NAME)
    assert not executor.poll().attempts


def _unreadable(path):
    path.write_text("{}")
    path.chmod(0)


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        os.mkdir,
        _unreadable,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"exit_code": "0", "detail": ""}'),
    ],
)
@pytest.mark.parametrize("file", ["result.json", "cgroup.json", "lock"])
def test_a_file_that_a_job_replaced_delays_no_other_job(executor, tmp_path, file, put):
    """Neither blocks a daemon, nor keeps a device for ever, nor stops other attempts."""
    other = AttemptName(8, 1)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    path = folder_of(tmp_path) / file
    path.unlink(missing_ok=True)
    put(path)
    executor.start(assignment(tmp_path, "true", name=other, log_file=tmp_path / "other"))
    assert wait_for_end(executor, other).exit_code == 0
    executor.stop(NAME, 0.0)
    assert wait_for_end(executor).phase in (EXITED, LOST)
    wait_until(lambda: not left_of(tmp_path), "nothing of it runs")
    executor.forget(NAME)
    assert status_of(executor) is None


@pytest.mark.parametrize("damage", ["{ha", "[]", "{}"])
def test_a_wish_to_stop_that_cannot_be_read_is_one(executor, tmp_path, damage):
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    (folder_of(tmp_path) / attempt_folder.STOP).write_text(damage)
    assert wait_for_end(executor).exit_code == 4


def test_an_attempt_that_runs_is_never_told_to_have_ended(executor, tmp_path):
    """Not when a later one was forgotten, nor when its start is repeated without descriptors."""
    later = NAME._replace(attempt=NAME.attempt + 1)
    executor.start(assignment(tmp_path, *python(OBEYS)))
    wait_for_text(tmp_path / "log", "ready")
    executor.kill(later)
    wait_for_end(executor, later)
    executor.forget(later)
    adopted = executor_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with contextlib.suppress(RunError):
            adopted.start(assignment(tmp_path, *python(OBEYS)))
        told = None
        with contextlib.suppress(RunError):
            told = status_of(adopted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert told is None or told.phase == RUNNING
    adopted.start(assignment(tmp_path, *python(OBEYS)))
    assert status_of(adopted).phase == RUNNING
    adopted.close()
