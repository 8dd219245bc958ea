"""The folder of an attempt: orders to its supervisor, and the supervisor's reports.

    assignment.json   what to run; written before any supervisor starts
    lock              held by the supervisor while it lives (flock: the kernel frees it); its
                      modification time is the heartbeat of the supervisor
    begun.json        the supervisor; a process that finds it never runs the command again
    cgroup.json       the control group of the commands, if they have one
    running.json      the commands
    stop.json         request to end: SIGTERM, and SIGKILL after the grace
    result.json       the outcome; no process of the attempt is left

All files are written under another name first and then renamed, so a reader finds a complete file
or none. The files are the whole interface between an executor and a supervisor, on this machine or
another.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hocket.base import locks
from hocket.processes import system
from hocket.service.plain_file import NotPlainError, open_plain

ASSIGNMENT = "assignment.json"
LOCK = "lock"
BEGUN = "begun.json"
CGROUP = "cgroup.json"
RUNNING = "running.json"
STOP = "stop.json"
RESULT = "result.json"

MARK = "HOCKET_ATTEMPT_MARK"
"""Environment variable by which every process of an attempt can be found."""

DAMAGED = (ValueError, TypeError, KeyError, OverflowError, RecursionError, NotPlainError)
"""Errors of reading a file whose content was changed, which a job can do with its own files."""
_MAX_BYTES = 32 << 20


class AttemptName(NamedTuple):
    """Name of an attempt: the numbers of its job and of the attempt."""

    job: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job}-{self.attempt}"


class Assignment(NamedTuple):
    """All that an executor needs to run an attempt."""

    name: AttemptName
    command: tuple[str, ...]
    """Program and arguments, including those to resume with."""
    environment: Mapping[str, str]
    """Variables of the job and of the lease (``HOCKET_...``); an executor adds devices and ranks.
    """
    work_folder: Path
    log_file: Path
    """File that receives standard output and error of all processes of the attempt."""
    devices: tuple[str, ...]
    device_type: str
    processes: Literal["one", "per-device"] = "one"
    grace_s: float = 30.0
    memory_bytes: int | None = None
    """Memory limit of all its processes together on one machine; None for no limit."""
    cpus: float | None = None
    """Limit in CPU cores (CPU time per wall-clock time); None for no limit."""
    gpus: tuple[int, ...] | None = None
    """Numbers of the GPUs that it may open, set by the executor; None if its devices are no GPUs.
    """
    first_rank: int = 0
    """Rank of its first process if other processes of the gang run on other machines."""
    lease_file: str = ""
    """File with the time until which it may run without the daemon; empty for no limit."""
    has_own_folder: bool = False
    """True if the daemon made ``work_folder`` for this job; False if the job named it."""
    unix_user: str = ""
    """Unix user as which it runs if the executor is root; empty for the user of the service."""
    log_limit_bytes: int = 1 << 30

    def to_data(self) -> dict[str, Any]:
        """The assignment as JSON."""
        data = self._asdict()
        return {key: str(one) if isinstance(one, Path) else one for key, one in data.items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Assignment:
        """Inverse of `to_data`."""
        paths = {key: Path(data[key]) for key in ("work_folder", "log_file")}
        lists = {key: tuple(data[key]) for key in ("command", "devices")}
        return cls(**{**data, **paths, **lists, "name": AttemptName(*data["name"])})


class Result(NamedTuple):
    """Result of an attempt."""

    exit_code: int
    detail: str
    is_lost: bool = False
    was_asked: bool = True
    """True if it was, or may have been, asked to stop before it ended."""


def mark_of(folder: str | Path) -> str:
    """``NAME=value`` of the environment variable that all processes of the attempt have.

    Derived from the attempt's name and the inode of the folder of all attempts, which does not
    change when a state is set aside. So nothing that a job can write changes the mark, and no two
    fleets share one.
    """
    parent, name = os.path.split(os.path.realpath(folder))
    fleet = os.stat(parent)
    return f"{MARK}={fleet.st_dev}-{fleet.st_ino}-{name}"


def write_assignment(folder: str | Path, assignment: Assignment) -> None:
    """Write the assignment for a supervisor; ``folder`` must exist."""
    write_json(os.path.join(folder, ASSIGNMENT), assignment.to_data())


def read_assignment(folder: str | Path) -> Assignment | None:
    """The assignment of a folder; None if there is none."""
    content = read_json(os.path.join(folder, ASSIGNMENT))
    return None if content is None else Assignment.from_data(content)


def ask_to_stop(folder: str | Path, grace_s: float) -> None:
    """Request the end of the attempt: one that has not begun ends at once, others get signals."""
    write_json(os.path.join(folder, STOP), {"grace_s": grace_s})


def asked_grace_s(folder: str | Path) -> float | None:
    """Grace that the attempt was given; None if it was not asked to stop."""
    content = read_json(os.path.join(folder, STOP))
    return None if content is None else float(content["grace_s"])


def write_result(folder: str | Path, result: Result) -> None:
    """Write the result of the attempt."""
    write_json(os.path.join(folder, RESULT), result._asdict())


def read_result(folder: str | Path) -> Result | None:
    """Result of the attempt; None if it has not ended."""
    content = read_json(os.path.join(folder, RESULT))
    if content is None:
        return None
    result = Result(**content)
    if result.exit_code not in range(-64, 256):
        raise ValueError("no exit code")
    detail = str(result.detail)[:1000].encode(errors="replace").decode()
    return result._replace(detail=detail)


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write a file atomically, and flush it to disk."""
    # Random, because daemon and supervisor may write the same file at once, and no job may predict
    # the name.
    temporary = f"{path}.{os.urandom(8).hex()}"
    with open(temporary, "x") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(folder: str | Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: str | Path) -> dict[str, Any] | None:
    """The content of a file that `write_json` wrote; None if there is none."""
    try:
        with open(open_plain(path), "rb") as file:
            content: dict[str, Any] = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except PermissionError:
        raise NotPlainError(path) from None
    return content


def boot_time_s() -> float:
    """Seconds since boot, including sleep: a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def renew_lease(path: str | Path, until_s: float, grace_s: float) -> None:
    """Let attempts run until ``until_s`` on the clock `boot_time_s`, plus ``grace_s`` to end."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump({"boot": system.boot(), "until_s": until_s, "grace_s": grace_s}, file)
    os.replace(temporary, path)


def lease_grace_s(path: str | Path) -> float | None:
    """Grace of an attempt whose lease is over; None while the lease holds."""
    content = read_json(path)
    if content is None or content["boot"] != system.boot():
        return 0.0
    is_over = boot_time_s() >= float(content["until_s"])
    return float(content["grace_s"]) if is_over else None


def beat(folder: str | Path) -> None:
    """Renew the heartbeat, which shows that the supervisor is neither dead nor stopped."""
    with contextlib.suppress(OSError):
        os.utime(os.path.join(folder, LOCK))


def last_beat(folder: str | Path) -> int:
    """A number that changes with every heartbeat."""
    return os.stat(os.path.join(folder, LOCK)).st_mtime_ns


def try_lock(folder: str | Path) -> int | None:
    """Descriptor that holds the lock of an attempt until closed; None if another holds it."""
    path = os.path.join(folder, LOCK)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EACCES, errno.ELOOP):
            raise
        # A job may have put something in place of the lock file that can never be locked.
        os.rename(path, f"{path}.{os.urandom(8).hex()}")
        return try_lock(folder)
    if locks.try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None
