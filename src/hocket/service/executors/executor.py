"""Interface of engines that run jobs, and what the daemon relies on.

An attempt is one run of a job on one set of devices, named by the job's number and the attempt's
number; that name is the fencing token. The daemon calls from one thread, never two at once, and a
call may take seconds; it may be killed before, in or after any call and will then ask again. So:

* ``start`` twice with one name runs the command at most once, whoever calls it.
* ``stop`` and ``kill`` of an attempt that is not there are no errors.
* ``poll`` finds attempts that an earlier daemon started. It says `EXITED` only when no process of
  the attempt is left: the daemon gives the devices away then.
* An attempt whose engine died with it (a node, a supervisor) is `LOST`, and nothing of it runs any
  more, or it can no longer report: its name is refused from then on.
* An attempt that was asked to stop, or is stopped before it began, never starts afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from hocket.fleet.rounds.state import FleetDevice

Phase = Literal["starting", "running", "exited", "lost"]
STARTING: Phase = "starting"
RUNNING: Phase = "running"
EXITED: Phase = "exited"
LOST: Phase = "lost"


class AttemptName(NamedTuple):
    """Which attempt of which job."""

    job: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job}-{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """All that an executor needs to run an attempt."""

    name: AttemptName
    command: tuple[str, ...]
    """Program and arguments, those to resume with included."""
    environment: Mapping[str, str]
    """Variables of the job and of the lease (``HOCKET_...``); an executor adds those that name
    the devices and ranks."""
    work_folder: Path
    log_file: Path
    """Where standard output and error of all its processes go."""
    devices: tuple[str, ...]
    kind: str
    processes: Literal["one", "per-device"] = "one"
    grace_s: float = 30.0
    memory_bytes: int | None = None
    """Limit of all its processes on one machine; None for none."""
    cpus: float | None = None
    """Limit in CPU cores (CPU time per wall-clock time); None for no limit."""
    gpus: tuple[int, ...] | None = None
    """Numbers of the GPUs that it may open, set by the executor; None where they are no GPUs."""
    first_rank: int = 0
    """Of its first process, where others of the gang run on other machines."""
    lease_file: str = ""
    """File that says until when it may run without news of the daemon; empty for ever."""
    has_own_folder: bool = False
    """True where ``work_folder`` is the job's alone, made by the daemon, and not one it named."""
    unix_user: str = ""
    """Unix user that it runs as, where the executor is root; empty for the user of the service."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of an attempt."""

    name: AttemptName
    phase: Phase
    exit_code: int | None = None
    """Of `EXITED`: 0 for success, negative for a signal, as in `subprocess`."""
    detail: str = ""
    """Why it is lost or could not be started, for people."""
    was_asked: bool = True
    """True if it may have ended because it was asked to. An executor that knows of an `EXITED` one
    that it was not, however soon after that it would have been, says so: its exit code counts."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """Attempts and devices that an executor sees now."""

    attempts: Sequence[Status]
    """Of all attempts that were started and not forgotten."""
    devices: tuple[FleetDevice, ...] = field(default=())
    """Those that can be used now; one that was there before and is missing is lost."""


class Executor(Protocol):
    """An engine that runs attempts."""

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt and return at once; errors are reported by ``poll``."""

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Ask an attempt to end (SIGTERM) and make it end after ``grace_s`` (SIGKILL)."""

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""

    def poll(self) -> Poll:
        """Report what runs, what ended, which devices there are."""

    def forget(self, name: AttemptName) -> None:
        """The end of an attempt is stored: ``poll`` need not tell of it any more."""

    def close(self) -> None:
        """Let go of connections; what runs goes on running."""
