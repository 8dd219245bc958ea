"""Bodies of requests and answers, as OpenAPI describes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from hocket.service.records import JobRecord, JobStatus
from hocket.service.spec import JobSpec, Name, Text
from hocket.service.tokens import Role

MAX_NUMBER = 2**53 - 1
"""Numbers of jobs and events that JSON and sqlite both hold exactly."""
HIDDEN = "…"
"""Stands for the value of an environment variable, which may be a secret."""

Number = Annotated[int, Path(ge=1, le=MAX_NUMBER)]
After = Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Those that come after this one")]
Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class JobBody(_Answer):
    """A job; moments are seconds since 1970."""

    id: int = Field(validation_alias="number")
    status: JobStatus
    spec: JobSpec = Field(description="As submitted, with the environment's values left out")
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    attempt: int = Field(description="The newest; 0 before the first")
    failures: int
    done_steps: float
    devices: list[str]
    message: str = Field(description="Why it ended, or why its last attempt did")
    version: int = Field(description="Rises with every change; the ETag")
    owner: str = Field(description="User whose token it was submitted with")
    array_first: int | None = Field(description="First job of its array; null for none")
    array_index: int | None


def job_body(record: JobRecord) -> JobBody:
    """A job as users see it."""
    environment = dict.fromkeys(record.spec.environment, HIDDEN)
    spec = record.spec.model_copy(update={"environment": environment})
    return JobBody.model_validate(replace(record, spec=spec))


class JobList(BaseModel):
    """A page of jobs in order of their numbers."""

    jobs: list[JobBody]
    next_after: int | None = Field(description="Cursor of the next page; null on the last")


class AttemptBody(_Answer):
    """One run of a job."""

    job: int
    attempt: int
    devices: list[str]
    device_type: str
    decided_s: float
    started_s: float | None
    stopping_since_s: float | None
    ended_s: float | None
    outcome: str
    exit_code: int | None


class AttemptList(BaseModel):
    """The attempts of a job."""

    attempts: list[AttemptBody]


class CheckpointBody(_Answer):
    """A checkpoint that counts."""

    job: int
    attempt: int
    step: float
    path: str
    committed_s: float


class CheckpointList(BaseModel):
    """The checkpoints of a job."""

    checkpoints: list[CheckpointBody]


class ReportRequest(_Body):
    """Report that the processes of an attempt send from time to time."""

    done_steps: Annotated[float, Field(ge=0.0, le=1e15, allow_inf_nan=False)]
    is_finished: bool = False
    can_save: bool = Field(False, description="Whether it saves its work when it has to leave")


class LeaseBody(_Answer):
    """Answer to a report: whether the attempt may continue."""

    attempt: int
    may_run: bool
    stop_by_s: float | None = Field(description="When it is killed, if it may not run")
    round_ends_s: float | None


class CheckpointRequest(_Body):
    """A checkpoint that was written whole."""

    step: Annotated[float, Field(ge=0.0, le=1e15, allow_inf_nan=False)]
    path: Text


class DeviceBody(_Answer):
    """A device and the jobs on it."""

    name: str
    device_type: str
    server: str
    is_up: bool
    is_drained: bool = Field(description="Takes no new jobs")
    jobs: list[int]


class DeviceList(BaseModel):
    """All devices that are or were part of the fleet."""

    devices: list[DeviceBody]


class DrainRequest(_Body):
    """A machine or device by name."""

    name: Name


class DrainBody(BaseModel):
    """The devices that were changed."""

    devices: list[str]


class UsageBody(_Answer):
    """Device time of a user in a team on a device type in a week."""

    week: str = Field(description="ISO year and week, such as 2026-W47")
    user: str
    team: str
    device_type: str
    device_hours: float


class UsageList(BaseModel):
    """Device time, the oldest week first."""

    usage: list[UsageBody]


class ShareBody(BaseModel):
    """Share of a job and what it has received."""

    job: int
    name: str
    target: dict[str, float] = Field(description="Part of its time on each device type")
    deficit_s: dict[str, float] = Field(
        description="Time on each device type that it should have had and did not"
    )
    target_s: float = Field(description="Device time that it should have had")
    held_s: float = Field(description="Device time that it had")
    devices: list[str]


class AllocationBody(BaseModel):
    """Last decision of the policy."""

    policy: str
    round: int
    time_s: float
    solved_s: float | None
    next_round_s: float | None
    remarks: dict[str, str]
    jobs: list[ShareBody]


class EventBody(_Answer):
    """Something that happened."""

    sequence: int
    time_s: float
    kind: str
    job: int | None
    detail: dict[str, Any]


class WhatIf(_Body):
    """Changes to try; empty for things as they are."""

    policy: Name | None = None
    devices: Annotated[
        dict[Name, Annotated[int, Field(ge=0, le=100_000)]],
        Field(max_length=100, description="How many devices of one type there would be"),
    ] = {}


class ForecastJob(BaseModel):
    """Predicted start and end of a job; null if beyond the forecast."""

    number: int
    name: str
    start_s: float | None
    end_s: float | None


class ForecastBody(BaseModel):
    """Forecast of the jobs."""

    policy: str
    time_s: float
    reached_s: float
    is_cut_off: bool
    num_events: int
    num_jobs: int
    num_ended: int
    num_preemptions: int
    average_completion_s: float | None
    last_end_s: float | None
    utilisation: float | None
    jobs: list[ForecastJob]


class ExplanationBody(BaseModel):
    """Explanation of a job that waits, runs or has ended."""

    job: int
    status: JobStatus
    sentence: str
    estimated_start_s: float | None
    earliest_start_s: float | None = Field(
        description="The same if jobs that have not shown whether they save their work do"
    )
    not_before_s: float | None = Field(description="How far was looked where no start was found")
    evidence: dict[str, Any]


class TokenRequest(_Body):
    """Name and role of a new token."""

    name: Name
    role: Role = "user"


class TokenBody(_Answer):
    """Name and role of a token."""

    name: str
    role: Role
    made_s: float


class TokenList(BaseModel):
    """All tokens."""

    tokens: list[TokenBody]


class NewTokenBody(BaseModel):
    """A token that is shown only once."""

    name: str
    role: Role
    token: str


class LinkBody(BaseModel):
    """An address for a browser."""

    url: str


class HealthBody(BaseModel):
    """Health of the service."""

    status: str
