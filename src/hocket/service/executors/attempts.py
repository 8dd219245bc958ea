"""The attempts of an executor: a folder for each, and the names that may not be reused.

Shared by all executors. A name whose attempt is forgotten is never used again, so for each job the
number of its last forgotten attempt is stored. Folders appear and disappear in one rename, even if
a process is killed meanwhile. A folder without its first file would wait for ever for its
assignment, and a folder that had lost only its last files would look like an attempt that has not
begun.
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
from hocket.service.plain_file import NotPlainError

CANNOT_START = 126
"""Exit code of an attempt that could not be started."""

_FOLDER_NAME = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_FORGOTTEN = "forgotten"
_NEW, _REMOVED = ".new", ".removed"
"""Name suffixes of folders that are being made or removed."""


class Attempts:
    """Folders of attempts in ``folder``, and the names that may not be used again."""

    def __init__(self, folder: Path, log_limit_bytes: int) -> None:
        self._folder = folder
        self._forgotten = folder / _FORGOTTEN
        self._log_limit_bytes = log_limit_bytes
        self._refused: dict[AttemptName, str] = {}
        with _telling(f"keep attempts in {str(folder)!r}"):
            for place in (folder, self._forgotten):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for ending in (_NEW, _REMOVED):
            for rest in self._forgotten.glob(f"*{ending}"):
                shutil.rmtree(rest, ignore_errors=True)

    def path(self, name: AttemptName) -> Path:
        """The folder of an attempt, whether it exists or not."""
        return self._folder / str(name)

    def names(self) -> list[AttemptName]:
        """Attempts that have a folder, in order."""
        with _telling("look at attempts"):
            entries = os.listdir(self._folder)
        matches = (_FOLDER_NAME.fullmatch(entry) for entry in entries)
        return sorted(AttemptName(int(match[1]), int(match[2])) for match in matches if match)

    def refused(self) -> list[Status]:
        """Statuses of attempts that were refused because their names are used up."""
        return [
            Status(name=name, phase=EXITED, exit_code=CANNOT_START, detail=detail)
            for name, detail in self._refused.items()
        ]

    def accept(self, assignment: Assignment) -> bool:
        """Store what to run, unless that was done before; False for a name that is used up."""
        name = assignment.name
        with _telling(f"start attempt {name}"):
            if self._is_used_up(name):
                self._refused[name] = "this attempt, or a later one of its job, has ended before"
                return False
            with self._made(name) as folder:
                if not (folder / files.ASSIGNMENT).exists():
                    limited = assignment._replace(log_limit_bytes=self._log_limit_bytes)
                    files.write_assignment(folder, limited)
        return True

    def ask_to_stop(self, name: AttemptName, grace_s: float) -> bool:
        """Request the end of an attempt; False if it is forgotten. One not begun never begins."""
        with _telling(f"stop attempt {name}"):
            if self._is_used_up(name):
                return False
            with self._made(name) as folder:
                earlier_s = files.asked_grace_s(folder)
                # A repeated request must not extend the grace: the supervisor keeps the time that
                # it got first.
                if earlier_s is None or grace_s < earlier_s:
                    files.ask_to_stop(folder, grace_s)
        return True

    def forget(self, name: AttemptName, status: Status | None) -> None:
        """Remove the folder of an attempt if its status says that it ended.

        A refusal of its name is no longer reported either; the name stays used up.
        """
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

    def _is_used_up(self, name: AttemptName) -> bool:
        """True if a name is used up; that of an attempt that still has its folder is not."""
        return not self.path(name).exists() and name.attempt <= self._last_forgotten(name.job)

    def _last_forgotten(self, job: int) -> int:
        content = files.read_json(self._forgotten / str(job))
        return -1 if content is None else int(content["attempt"])


def looked_at(name: AttemptName, folder: Path, look: Callable[[], Status]) -> Status | None:
    """Status of an attempt by ``look``, even if its files are damaged; None if it is gone."""
    for is_last in (False, True):
        try:
            return look()
        except Exception as error:
            if not folder.exists():
                return None
            if isinstance(error, OSError) and not isinstance(error, NotPlainError):
                # An unknown status is no reason to give the devices to others.
                return Status(name=name, phase=RUNNING, detail=system_reason(error))
            if is_locked(folder):
                return Status(name=name, phase=RUNNING, detail="its files are damaged")
            # The supervisor may have ended since, with a result that the second look reads.
            if is_last:
                break
    return Status(name=name, phase=LOST, detail="its files are damaged")


def is_locked(folder: Path) -> bool:
    """True if the supervisor of an attempt is alive."""
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
    """Convert errors to `RunError` that names the failed action; the caller may retry."""
    try:
        yield
    except (OSError, *DAMAGED) as error:
        raise RunError(f"cannot {what}: {error}") from None
