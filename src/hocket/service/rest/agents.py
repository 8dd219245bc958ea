"""Routes of agents: report attempts and fetch orders, send output and checkpoints.

An agent's token opens these routes alone, and only under the agent's own name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from hocket.service.errors import ForbiddenError, NotFoundError
from hocket.service.executors.agent_executor import AgentExecutor
from hocket.service.executors.executor import AttemptName, Phase, Status
from hocket.service.plain_file import open_plain
from hocket.service.rest.bodies import MAX_NUMBER, Number
from hocket.service.rest.context import FOR_USERS, TheDaemon, TheHolder
from hocket.service.rest.problems import answers
from hocket.service.spec import Name

router = APIRouter(prefix="/v1/agents/{agent}", tags=["agents"], dependencies=FOR_USERS)

# Limits of one log and of one checkpoint, and the size of the parts in which checkpoints are
# fetched.
MAX_LOG_BYTES = 1 << 30
MAX_CHECKPOINT_BYTES = 64 << 30
CHUNK_BYTES = 512 * 1024
# Folder of the checkpoints that agents sent, in the state folder.
_CHECKPOINTS = "checkpoints"
Offset = Annotated[int, Query(ge=0, le=MAX_NUMBER)]
_BINARY = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}}


class AgentAttempt(BaseModel):
    """Status of an attempt on an agent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    attempt: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    phase: Phase
    exit_code: Annotated[int, Field(ge=-1000, le=1000)] | None
    detail: Annotated[str, Field(max_length=2000)]
    was_asked: bool

    @property
    def status(self) -> Status:
        """The same for the daemon."""
        fields = self.model_dump(exclude={"job", "attempt"})
        return Status(name=AttemptName(self.job, self.attempt), **fields)


class SyncRequest(BaseModel):
    """Devices and attempts of an agent."""

    model_config = ConfigDict(extra="forbid")

    identity: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    devices: Annotated[list[tuple[Name, Name]], Field(max_length=10_000)]
    attempts: Annotated[list[AgentAttempt], Field(max_length=10_000)]


class AgentOrders(BaseModel):
    """Orders to an agent; repeating one has no effect."""

    lease_s: float
    ends_after_s: float
    grace_s: float
    starts: list[dict[str, object]]
    stops: list[tuple[int, int, float]]
    forgets: list[tuple[int, int]]
    checkpoints: list[tuple[int, float, str]] = Field(
        description="Checkpoints of its jobs that the service cannot read: job, step and path"
    )


class LogSize(BaseModel):
    """Size of a log at the service."""

    size_bytes: int


async def _executor(agent: Name, request: Request, holder: TheHolder) -> AgentExecutor:
    if holder.name != agent:
        raise ForbiddenError(f"this is the token of {holder.name!r}, not of {agent!r}")
    executor: AgentExecutor | None = request.app.state.agents
    if executor is None:
        raise NotFoundError("this service takes no agents", hint="serve with --on agents")
    return executor


TheAgents = Annotated[AgentExecutor, Depends(_executor)]


@router.post("/sync", responses=answers(404, 409, 415))
def sync_agent(
    agent: Name, body: SyncRequest, request: Request, daemon: TheDaemon, executor: TheAgents
) -> AgentOrders:
    """Store the report of an agent and return its orders; renews its lease."""
    statuses = [one.status for one in body.attempts]
    address = request.client.host if request.client else ""
    orders = executor.sync(agent, body.identity, address, body.devices, statuses)
    found = daemon.service_state.checkpoints
    jobs = sorted({one.job for one in body.attempts} & found.keys())
    hidden = [
        (job, found[job].step, found[job].path)
        for job in jobs
        if not os.path.exists(found[job].path)
    ]
    return AgentOrders(**orders, checkpoints=hidden)


@router.post("/logs/{job}/{attempt}", responses=answers(404), openapi_extra=_BINARY)
async def append_log(
    agent: Name,
    job: Number,
    attempt: Number,
    offset: Offset,
    request: Request,
    executor: TheAgents,
) -> LogSize:
    """Append to the output of an attempt at ``offset``; returns the size after that."""
    path = executor.log_file(agent, AttemptName(job, attempt))
    if path is None:
        raise NotFoundError(f"{agent!r} does not run attempt {attempt} of job {job}")
    data = await request.body()
    size_bytes = await run_in_threadpool(_append, path, offset, data, MAX_LOG_BYTES)
    return LogSize(size_bytes=size_bytes)


def _append(path: Path, offset: int, data: bytes, limit_bytes: int) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "wb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes >= limit_bytes:
            # Reported as written and dropped; otherwise the agent would send it again forever.
            return offset + len(data)
        if offset == size_bytes:
            file.write(data)
            return size_bytes + len(data)
        return size_bytes


@router.post("/checkpoints/{job}", responses=answers(404, 409), openapi_extra=_BINARY)
async def store_checkpoint(
    agent: Name,
    job: Number,
    step: Annotated[float, Query(ge=0.0, le=1e15, allow_inf_nan=False)],
    offset: Offset,
    request: Request,
    daemon: TheDaemon,
    executor: TheAgents,
    is_whole: bool = False,
) -> LogSize:
    """Keep a part of a checkpoint for other machines; the last one makes it the job's newest."""
    if not executor.has_part(agent, job):
        raise NotFoundError(f"{agent!r} runs no attempt of job {job}")
    folder = daemon.folder / _CHECKPOINTS
    part = folder / f"{job}.{agent.replace('/', '_')}.part"
    data = await request.body()
    size_bytes = await run_in_threadpool(_store_part, part, offset, data)
    if is_whole and size_bytes == offset:
        os.replace(part, folder / f"{job}.tar")
    return LogSize(size_bytes=size_bytes)


def _store_part(path: Path, offset: int, data: bytes) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if offset == 0:
        path.unlink(missing_ok=True)
    return _append(path, offset, data, MAX_CHECKPOINT_BYTES)


@router.get("/checkpoints/{job}", response_class=Response, responses=answers(404))
def fetch_checkpoint(
    agent: Name, job: Number, offset: Offset, daemon: TheDaemon, executor: TheAgents
) -> Response:
    """A part of the newest checkpoint that an agent sent for a job; empty behind its end."""
    if not executor.has_part(agent, job):
        raise NotFoundError(f"{agent!r} runs no attempt of job {job}")
    try:
        with open(open_plain(daemon.folder / _CHECKPOINTS / f"{job}.tar"), "rb") as file:
            file.seek(offset)
            return Response(file.read(CHUNK_BYTES), media_type="application/octet-stream")
    except FileNotFoundError:
        raise NotFoundError(f"no agent has sent a checkpoint of job {job}") from None
