"""Folders of attempts: whoever is killed in between, no name is used twice and none is stuck."""

import os
import shutil

import pytest
from service.local_attempts import NAME, assignment, executor_in, folder_of, wait_for_end

from hocket.base.errors import RunError
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import Result
from hocket.service.executors.attempts import Attempts, looked_at
from hocket.service.executors.executor import EXITED, LOST, RUNNING, Status

OVER = Status(name=NAME, phase=EXITED, exit_code=0)
LATER = NAME._replace(attempt=NAME.attempt + 1)


class KilledError(BaseException):
    """Stands for kill -9: nothing that would catch an error goes on."""


@pytest.fixture
def attempts(tmp_path):
    return Attempts(tmp_path / "attempts", 1000)


@pytest.fixture
def killed_at(monkeypatch):
    """Be killed at the call of some functions of `os` after so many calls of them."""

    def prepare(count, *names):
        calls = iter(range(count))

        def wrapped(function):
            def call(*arguments, **options):
                if next(calls, None) is None:
                    raise KilledError
                return function(*arguments, **options)

            return call

        for name in names:
            monkeypatch.setattr(os, name, wrapped(getattr(os, name)))

    return prepare


def test_an_attempt_that_is_forgotten_by_half_never_begins_again(tmp_path, killed_at, monkeypatch):
    executor = executor_in(tmp_path)
    executor.start(assignment(tmp_path, "true"))
    wait_for_end(executor)
    kept = tmp_path / "kept"
    shutil.copytree(folder_of(tmp_path), kept)
    for count in range(len(os.listdir(kept))):
        killed_at(count, "unlink")
        with pytest.raises(KilledError):
            executor.forget(NAME)
        monkeypatch.undo()
        assert not executor.poll().attempts
        next_executor = executor_in(tmp_path)
        assert not next_executor.poll().attempts
        assert os.listdir(tmp_path / "attempts" / "forgotten") == [str(NAME.job)]
        shutil.copytree(kept, folder_of(tmp_path))
    executor.close()


def test_an_attempt_is_accepted_as_a_whole_or_not_at_all(
    attempts, tmp_path, killed_at, monkeypatch
):
    for count in range(5):
        killed_at(count, "mkdir", "replace", "rename", "fsync")
        with pytest.raises(KilledError):
            attempts.accept(assignment(tmp_path, "true"))
        monkeypatch.undo()
        for name in Attempts(tmp_path / "attempts", 1000).names():
            assert files.read_assignment(attempts.path(name)) is not None
    assert attempts.accept(assignment(tmp_path, "true"))
    assert attempts.names() == [NAME]


def test_a_name_that_is_used_up_is_refused_until_that_is_known(attempts, tmp_path):
    work = assignment(tmp_path, "true")
    assert attempts.accept(work)
    attempts.forget(NAME, OVER)
    assert not attempts.ask_to_stop(NAME, 1.0)
    assert not attempts.accept(work)
    assert [(one.name, one.phase) for one in attempts.refused()] == [(NAME, EXITED)]
    attempts.forget(NAME, None)
    assert not attempts.refused()
    assert not attempts.names()


def test_what_has_a_folder_is_never_refused(attempts, tmp_path, monkeypatch):
    """Not though a later one was forgotten, nor where the disk fails: it may run."""
    work = assignment(tmp_path, "true")
    assert attempts.accept(work)
    attempts.ask_to_stop(LATER, 0.0)
    attempts.forget(LATER, OVER)
    assert attempts.accept(work)
    attempts.path(NAME).joinpath(files.ASSIGNMENT).unlink()
    monkeypatch.setattr(os, "urandom", lambda size: b"x" * size)
    attempts.path(NAME).joinpath(f"{files.ASSIGNMENT}.{os.urandom(8).hex()}").mkdir()
    with pytest.raises(RunError, match="cannot start attempt 7-2"):
        attempts.accept(work)
    assert not attempts.refused()


def test_a_place_where_nothing_can_be_kept_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot keep attempts"):
        Attempts(tmp_path / "file" / "attempts", 1000)


@pytest.mark.parametrize("damage", ["{ha", "[]", '{"grace_s": null}'])
def test_damage_is_told_as_an_error(attempts, tmp_path, damage):
    attempts.accept(assignment(tmp_path, "true"))
    (attempts.path(NAME) / files.STOP).write_text(damage)
    with pytest.raises(RunError, match="cannot stop attempt 7-2"):
        attempts.ask_to_stop(NAME, 1.0)
    (tmp_path / "attempts" / "forgotten" / "7").write_text(damage)
    with pytest.raises(RunError, match="cannot forget attempt 7-2"):
        attempts.forget(NAME, OVER)


def test_not_knowing_is_no_reason_to_give_devices_away(attempts, tmp_path):
    attempts.accept(assignment(tmp_path, "true"))
    folder = attempts.path(NAME)

    def fails(error):
        raise error

    assert looked_at(NAME, folder, lambda: fails(OSError(5, "no luck"))).phase == RUNNING
    lock = files.try_lock(folder)
    assert looked_at(NAME, folder, lambda: fails(ValueError())).phase == RUNNING
    os.close(lock)
    assert looked_at(NAME, folder, lambda: fails(ValueError())).phase == LOST
    files.write_result(folder, Result(0, ""))
    attempts.forget(NAME, OVER)
    assert looked_at(NAME, folder, lambda: fails(OSError(2, "gone"))) is None
    assert looked_at(NAME, folder, lambda: fails(ZeroDivisionError())) is None
