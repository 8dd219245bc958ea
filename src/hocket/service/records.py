"""Records of jobs, attempts, devices and events: rows of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hocket.service.spec import JobSpec

JobStatus = Literal[
    "queued",
    "blocked",
    "starting",
    "running",
    "stopping",
    "paused",
    "succeeded",
    "failed",
    "cancelled",
    "timed out",
]
# Status of jobs that have not ended, and of jobs that have.
LIVE: tuple[JobStatus, ...] = ("queued", "blocked", "starting", "running", "stopping", "paused")
ENDED: tuple[JobStatus, ...] = ("succeeded", "failed", "cancelled", "timed out")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job as users see it; its number is its id."""

    number: int
    spec: JobSpec
    status: JobStatus
    submitted_s: float
    """Seconds since 1970, like all times here."""
    started_s: float | None = None
    """Start of the first attempt."""
    ended_s: float | None = None
    attempt: int = 0
    """Number of the newest attempt; 0 before the first."""
    failures: int = 0
    done_steps: float = 0.0
    devices: tuple[str, ...] = ()
    """Devices that it holds now."""
    message: str = ""
    """Reason why the job, or its last attempt, ended."""
    version: int = 1
    """Counter of changes except those of ``done_steps``; used as ETag."""
    owner: str = ""
    """User whose token it was submitted with."""
    array_first: int | None = None
    """Number of the first job of its array; None for a job that is in none."""
    array_index: int | None = None


def ending_of(record: JobRecord) -> str:
    """Describe how a job ended."""
    became = "was cancelled" if record.status == "cancelled" else record.status
    said = "" if says_no_more(record) else f": {record.message}"
    return f"job {record.number} {became}{said}"


def says_no_more(record: JobRecord) -> bool:
    """True if the message of a job that has ended is only its status in other words."""
    return record.message in ("", record.status) or (
        record.status == "succeeded" and record.message == "finished"
    )


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One attempt; its devices are free for others once ``ended_s`` is set."""

    job: int
    attempt: int
    devices: tuple[str, ...]
    device_type: str
    token: str
    """Secret by which its processes authenticate."""
    decided_s: float
    started_s: float | None = None
    """Time at which the executor was asked to start it; None while its devices are still in use."""
    stopping_since_s: float | None = None
    knows_it_must_leave: bool = False
    """True once a response asked it to leave: exit code 0 then does not mean success."""
    ended_s: float | None = None
    outcome: str = ""
    """"finished", "failed", "lost", or the reason why it was stopped."""
    exit_code: int | None = None


class HeldAttempt(NamedTuple):
    """An attempt with the user, the team and the name of its job."""

    record: AttemptRecord
    user: str
    team: str
    name: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint that counts: it was committed by the attempt that held the job."""

    job: int
    attempt: int
    step: float
    path: str
    committed_s: float


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened; numbers rise by one and are the cursor of the stream."""

    sequence: int
    time_s: float
    kind: str
    """submitted, started, stopped, succeeded, failed, cancelled, device-lost, round, ..."""
    job: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A device, and the jobs that the state gives it to."""

    name: str
    device_type: str
    server: str
    is_up: bool
    is_drained: bool
    jobs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LeaseAnswer:
    """Answer to the report of an attempt."""

    attempt: int
    may_run: bool
    """False if the attempt must save, commit a checkpoint and exit."""
    stop_by_s: float | None = None
    """Time at which the attempt is killed; None while it may run."""
    round_ends_s: float | None = None
    """Time until which it keeps its devices unless something happens; None if no round is due."""
