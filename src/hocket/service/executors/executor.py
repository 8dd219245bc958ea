"""Interface of engines that run jobs, and the properties on which the daemon relies.

An attempt is one run of a job on one set of devices, named by the job's number and the attempt's
number; that name is the fencing token. The daemon calls from one thread, never two at once, and a
call may take seconds. The daemon may be killed before, in or after any call, and will then repeat
it. So:

* ``start`` twice with one name runs the command at most once, whoever calls it. * ``stop`` and
``kill`` of an unknown attempt are no errors. * ``poll`` finds attempts that an earlier daemon
started. It reports `EXITED` only when no process
  of the attempt is left, because the daemon then gives the devices to others.
* An attempt whose engine died with it (a node, a supervisor) is `LOST`: nothing of it runs any
  more, or it can no longer report, because its name is refused from then on.
* An attempt that was asked to stop, or is stopped before it began, never starts afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hocket.fleet.rounds.state import FleetDevice
from hocket.service.executors.attempt_folder import Assignment, AttemptName

__all__ = ["Assignment", "AttemptName", "Executor", "Phase", "Poll", "Status"]

Phase = Literal["starting", "running", "exited", "lost"]
STARTING: Phase = "starting"
RUNNING: Phase = "running"
EXITED: Phase = "exited"
LOST: Phase = "lost"


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of an attempt."""

    name: AttemptName
    phase: Phase
    exit_code: int | None = None
    """Exit code if `EXITED`: 0 for success, negative for a signal, as in `subprocess`."""
    detail: str = ""
    """Reason why the attempt is lost or could not be started."""
    was_asked: bool = True
    """True if the attempt may have ended because it was asked to.

    False only if the executor knows that an `EXITED` attempt had not been asked before it ended;
    its exit code then counts.
    """


@dataclass(frozen=True, kw_only=True)
class Poll:
    """Attempts and devices that an executor sees now."""

    attempts: Sequence[Status]
    """Statuses of all attempts that were started and not forgotten."""
    devices: tuple[FleetDevice, ...] = field(default=())
    """Devices that can be used now; a device of an earlier poll that is missing here is lost."""


class Executor(Protocol):
    """An engine that runs attempts."""

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt and return at once.

        Raises `RunError` if it may be tried again; other errors are reported by ``poll``.
        """

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Send an attempt SIGTERM, and SIGKILL if it still runs after ``grace_s``."""

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""

    def poll(self) -> Poll:
        """Statuses of all attempts, and the devices that can be used."""

    def forget(self, name: AttemptName) -> None:
        """Forget an attempt whose end is stored: ``poll`` no longer reports it."""

    def close(self) -> None:
        """Close connections; attempts continue to run."""
