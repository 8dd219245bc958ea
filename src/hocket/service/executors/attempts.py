"""The attempts of an executor: a folder for each, and a memory of names that are used up.

What all executors share. A name whose attempt is forgotten is never used again, so for each job the
number of its last forgotten attempt is kept. Folders come and go in one move, whoever is killed
meanwhile: one without its first file would wait for ever for what to run, and one that had lost
only its last files would look like an attempt that has yet to begin.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hocket.base.errors import RunError, system_reason
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import DAMAGED, Result
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    Assignment,
    AttemptName,
    Status,
)

CANNOT_START = 126
"""Exit code of an attempt that could not be begun."""

_FOLDER_NAME = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_FORGOTTEN = "forgotten"
_NEW, _REMOVED = ".new", ".removed"
"""Endings of folders that have not got their name yet, or have lost it."""


class Attempts:
    """Folders of attempts in ``folder``; ``memory`` (the same one where None) keeps the names."""

    def __init__(self, folder: Path, log_limit_bytes: int, *, memory: Path | None = None) -> None:
        self._folder = folder
        self._forgotten = (memory or folder) / _FORGOTTEN
        self._log_limit_bytes = log_limit_bytes
        self._refused: dict[AttemptName, str] = {}
        with _telling(f"keep attempts in {str(folder)!r}"):
            for place in (folder, self._forgotten):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for ending in (_NEW, _REMOVED):
            for rest in self._forgotten.glob(f"*{ending}"):
                shutil.rmtree(rest, ignore_errors=True)

    def path(self, name: AttemptName) -> Path:
        """The folder of an attempt, be it there or not."""
        return self._folder / str(name)

    def names(self) -> list[AttemptName]:
        """Attempts that have a folder, in order."""
        with _telling("look at attempts"):
            entries = os.listdir(self._folder)
        matches = (_FOLDER_NAME.fullmatch(entry) for entry in entries)
        return sorted(AttemptName(int(match[1]), int(match[2])) for match in matches if match)

    def refused(self) -> list[Status]:
        """Attempts that shall not begin because their names are used up."""
        return [
            Status(name=name, phase=EXITED, exit_code=CANNOT_START, detail=detail)
            for name, detail in self._refused.items()
        ]

    def accept(self, assignment: Assignment) -> bool:
        """Write down what to run, unless that was done before; False for a name that is used up."""
        name = assignment.name
        with _telling(f"start attempt {name}"):
            if self._is_over(name):
                self._refused[name] = "an attempt of this name, or a later one, ended before"
                return False
            with self._made(name) as folder:
                if not (folder / files.ASSIGNMENT).exists():
                    limit_bytes = self._log_limit_bytes
                    files.write_assignment(folder, assignment, log_limit_bytes=limit_bytes)
        return True

    def ask_to_stop(self, name: AttemptName, grace_s: float) -> bool:
        """Have an attempt ended; one that has not begun never will. False where it is forgotten."""
        with _telling(f"stop attempt {name}"):
            if self._is_over(name):
                return False
            with self._made(name) as folder:
                earlier_s = files.asked_grace_s(folder)
                # Asked again, a supervisor has what is left of the time that it was given first.
                if earlier_s is None or grace_s < earlier_s:
                    files.ask_to_stop(folder, grace_s)
        return True

    def forget(self, name: AttemptName, status: Status | None) -> None:
        """Remove the folder of an attempt where its status says that it ended, and tell no longer
        that a name was refused; it stays used up."""
        self._refused.pop(name, None)
        if status is None or status.phase not in (EXITED, LOST):
            return
        with _telling(f"forget attempt {name}"):
            if name.attempt > self._last_forgotten(name.job):
                files.write_json(self._forgotten / str(name.job), {"attempt": name.attempt})
            removed = self._forgotten / f"{name}{_REMOVED}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path(name), removed)
        shutil.rmtree(removed, ignore_errors=True)

    @contextlib.contextmanager
    def _made(self, name: AttemptName) -> Iterator[Path]:
        """The folder of an attempt; a new one gets its name when its first file is there."""
        folder = self.path(name)
        if folder.exists():
            yield folder
            return
        new = self._forgotten / f"{name}{_NEW}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        yield new
        os.rename(new, folder)

    def _is_over(self, name: AttemptName) -> bool:
        """True if a name is used up; an attempt that still has its folder is not over."""
        return not self.path(name).exists() and name.attempt <= self._last_forgotten(name.job)

    def _last_forgotten(self, job: int) -> int:
        content = files.read_json(self._forgotten / str(job))
        return -1 if content is None else int(content["attempt"])


def looked_at(name: AttemptName, folder: Path, look: Callable[[], Status]) -> Status | None:
    """Status of an attempt by ``look``, whatever state its files are in; None where it is gone."""
    for is_last in (False, True):
        try:
            return look()
        except OSError as error:
            if not folder.exists():
                return None
            # Not knowing is no reason to give its devices away.
            return Status(name=name, phase=RUNNING, detail=system_reason(error))
        except DAMAGED:
            if is_locked(folder):
                return Status(name=name, phase=RUNNING, detail="its files are damaged")
            # Its supervisor may have ended since, with a result that the second look reads.
            if is_last:
                break
    return Status(name=name, phase=LOST, detail="its files are damaged")


def is_locked(folder: Path) -> bool:
    """True if the supervisor of an attempt lives."""
    lock = files.try_lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is None


def ended(name: AttemptName, result: Result) -> Status:
    """Status of an attempt that has a result."""
    if result.is_lost:
        return Status(name=name, phase=LOST, detail=result.detail)
    return Status(
        name=name,
        phase=EXITED,
        exit_code=result.exit_code,
        detail=result.detail,
        was_asked=result.was_asked,
    )


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Tell what could not be done; whoever asked for it may ask again."""
    try:
        yield
    except (OSError, *DAMAGED) as error:
        raise RunError(f"cannot {what}: {error}") from None
