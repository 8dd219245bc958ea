"""The folder of an attempt: orders to its supervisor, and the supervisor's reports.

    assignment.json   what to run; written before any supervisor starts
    lock              held by the supervisor as long as it lives (flock: the kernel frees it); its
                      modification time is the heartbeat of the supervisor
    begun.json        the supervisor; whoever finds it never runs the command again
    cgroup.json       the control group of the commands, where they have one
    running.json      the commands
    stop.json         end: SIGTERM, and SIGKILL after its grace
    result.json       how it ended; no process of the attempt is left

All are written to another name first and then renamed, so a reader finds a whole file or none.
The files are the whole interface between an executor and a supervisor, on this machine or another.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hocket.base import locks
from hocket.processes import system

if TYPE_CHECKING:
    from hocket.service.executors.executor import Assignment

ASSIGNMENT = "assignment.json"
LOCK = "lock"
BEGUN = "begun.json"
CGROUP = "cgroup.json"
RUNNING = "running.json"
STOP = "stop.json"
RESULT = "result.json"

MARK = "HOCKET_ATTEMPT_MARK"
"""The variable by which every process of an attempt can be found."""

DAMAGED = (ValueError, TypeError, KeyError)
"""Errors of reading a file that is not as it was written."""


class AttemptOrder(NamedTuple):
    """Order for a supervisor: an `Assignment` without what only the daemon needs."""

    command: list[str]
    environment: dict[str, str]
    work_folder: str
    log_file: str
    devices: list[str]
    kind: str
    processes: str
    grace_s: float
    log_limit_bytes: int
    first_rank: int = 0
    """Of these processes, where others of the gang run on other machines."""
    mark: str = ""
    """Unique among attempts of all fleets, also earlier ones; empty for the path of the folder."""
    memory_bytes: int | None = None
    """Limit of all its processes together."""
    lease_file: str = ""
    """Holds until when the attempt may run without news of the daemon; empty for ever."""
    cpus: float | None = None
    gpus: list[int] | None = None
    """Numbers of the GPUs that it may open; None where its devices are no GPUs."""
    has_own_folder: bool = False
    unix_user: str = ""
    """User that the commands run as, where the supervisor may change that; empty for its own."""


class Result(NamedTuple):
    """Result of an attempt."""

    exit_code: int
    detail: str
    is_lost: bool = False
    was_asked: bool = True
    """True if it was asked to end before it did, or may have been."""


def mark_of(folder: str | Path) -> str:
    """The variable, with its value, that all processes of the attempt have."""
    order = read_order(folder)
    return f"{MARK}={(order.mark if order else '') or os.path.realpath(folder)}"


def write_assignment(
    folder: str | Path, assignment: Assignment, *, log_limit_bytes: int = 1 << 30
) -> None:
    """Tell a supervisor what to run; ``folder`` must exist."""
    order = AttemptOrder(
        command=list(assignment.command),
        environment=dict(assignment.environment),
        work_folder=str(assignment.work_folder),
        log_file=str(assignment.log_file),
        devices=list(assignment.devices),
        kind=assignment.kind,
        processes=assignment.processes,
        grace_s=assignment.grace_s,
        log_limit_bytes=log_limit_bytes,
        first_rank=assignment.first_rank,
        lease_file=assignment.lease_file,
        mark=f"{os.path.realpath(folder)}:{os.urandom(8).hex()}",
        memory_bytes=assignment.memory_bytes,
        cpus=assignment.cpus,
        gpus=None if assignment.gpus is None else list(assignment.gpus),
        has_own_folder=assignment.has_own_folder,
        unix_user=assignment.unix_user,
    )
    write_json(os.path.join(folder, ASSIGNMENT), order._asdict())


def read_order(folder: str | Path) -> AttemptOrder | None:
    """The order of a folder; None where there is none."""
    content = read_json(os.path.join(folder, ASSIGNMENT))
    return None if content is None else AttemptOrder(**content)


def ask_to_stop(folder: str | Path, grace_s: float) -> None:
    """Have the attempt ended: at once where it has not begun, or with SIGTERM and then SIGKILL."""
    write_json(os.path.join(folder, STOP), {"grace_s": grace_s})


def asked_grace_s(folder: str | Path) -> float | None:
    """Time that the attempt was given to end; None where nobody asked it to."""
    content = read_json(os.path.join(folder, STOP))
    return None if content is None else float(content["grace_s"])


def write_result(folder: str | Path, result: Result) -> None:
    """Tell how the attempt ended."""
    write_json(os.path.join(folder, RESULT), result._asdict())


def read_result(folder: str | Path) -> Result | None:
    """Result of the attempt; None where it has not ended."""
    content = read_json(os.path.join(folder, RESULT))
    return None if content is None else Result(**content)


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write a file as a whole, and make it last."""
    # Daemon and supervisor may write the same file at once.
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(folder: str | Path) -> None:
    """Make names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: str | Path) -> dict[str, Any] | None:
    """The content of a file that `write_json` wrote; None where there is none."""
    try:
        with open(path) as file:
            content: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return content


def boot_time_s() -> float:
    """Time since the machine started, sleep included: the same clock for all of its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def renew_lease(path: str | Path, until_s: float, grace_s: float) -> None:
    """Let attempts run until a moment of `boot_time_s`; then they have ``grace_s`` to end."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump({"boot": system.boot(), "until_s": until_s, "grace_s": grace_s}, file)
    os.replace(temporary, path)


def lease_grace_s(path: str | Path) -> float | None:
    """Time that an attempt has to end because its lease is over; None while it holds."""
    content = read_json(path)
    if content is None or content["boot"] != system.boot():
        return 0.0
    is_over = boot_time_s() >= float(content["until_s"])
    return float(content["grace_s"]) if is_over else None


def beat(folder: str | Path) -> None:
    """Show that the supervisor is alive and not halted."""
    with contextlib.suppress(OSError):
        os.utime(os.path.join(folder, LOCK))


def last_beat(folder: str | Path) -> int:
    """A number that changes with every heartbeat."""
    return os.stat(os.path.join(folder, LOCK)).st_mtime_ns


def try_lock(folder: str | Path) -> int | None:
    """The lock of an attempt, free again when this descriptor is closed; None where it is held."""
    descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    if locks.try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None
