"""Records of jobs, attempts, devices and events: rows of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
LIVE: tuple[JobStatus, ...] = ("queued", "blocked", "starting", "running", "stopping", "paused")
ENDED: tuple[JobStatus, ...] = ("succeeded", "failed", "cancelled", "timed out")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job as people see it; its number is its id."""

    number: int
    spec: JobSpec
    status: JobStatus
    submitted_s: float
    """Seconds since 1970, as all moments here."""
    started_s: float | None = None
    """First attempt."""
    ended_s: float | None = None
    attempt: int = 0
    """The newest; 0 before the first."""
    failures: int = 0
    done_steps: float = 0.0
    devices: tuple[str, ...] = ()
    """Devices that it holds now."""
    message: str = ""
    """Why it ended, or why its last attempt did."""
    version: int = 1
    """Rises with every change but of ``done_steps``: an ETag."""
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
    kind: str
    token: str
    """Secret of its processes."""
    decided_s: float
    started_s: float | None = None
    """When the executor was asked to start it; None while its devices are still in use."""
    stopping_since_s: float | None = None
    knows_it_must_leave: bool = False
    """True if a report of it was answered so: then its exit code does not tell that it is done."""
    ended_s: float | None = None
    outcome: str = ""
    """finished, failed, lost, or why it was stopped."""
    exit_code: int | None = None


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
    kind: str
    server: str
    is_up: bool
    jobs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LeaseAnswer:
    """Answer to the report of an attempt."""

    attempt: int
    may_run: bool
    """False: save, commit a checkpoint and exit."""
    stop_by_s: float | None = None
    """When it is killed; None while it may run."""
    round_ends_s: float | None = None
    """It keeps its devices until then, if nothing happens; None where no round is due."""
