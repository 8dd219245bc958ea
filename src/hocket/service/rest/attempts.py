"""Routes of the processes of a job: report progress, commit a checkpoint.

Requests have the token of their attempt. An attempt that lost its devices is refused with 409,
however late it wakes up: it can neither report nor commit.
"""

from __future__ import annotations

from fastapi import APIRouter

from hocket.service.executors.executor import AttemptName
from hocket.service.rest.bodies import (
    CheckpointBody,
    CheckpointRequest,
    LeaseBody,
    Number,
    ReportRequest,
)
from hocket.service.rest.context import KNOWN_QUERY, AttemptToken, TheDaemon, TheDecisions
from hocket.service.rest.problems import answers

router = APIRouter(
    prefix="/v1/jobs/{job}/attempts/{attempt}", tags=["attempts"], dependencies=[KNOWN_QUERY]
)


@router.post("/report", responses=answers(404, 409, 415))
async def report(
    job: Number,
    attempt: Number,
    body: ReportRequest,
    daemon: TheDaemon,
    decisions: TheDecisions,
    token: AttemptToken,
) -> LeaseBody:
    """Report progress of an attempt; the answer says whether it may continue."""
    name = AttemptName(job, attempt)
    lease = await decisions.of(
        daemon.report, name, token, body.done_steps, body.is_finished, body.can_save
    )
    return LeaseBody.model_validate(lease)


@router.post("/checkpoints", status_code=201, responses=answers(404, 409, 415))
async def commit_checkpoint(
    job: Number,
    attempt: Number,
    body: CheckpointRequest,
    daemon: TheDaemon,
    decisions: TheDecisions,
    token: AttemptToken,
) -> CheckpointBody:
    """Make a checkpoint count: the next attempt starts from it."""
    name = AttemptName(job, attempt)
    record = await decisions.of(daemon.commit_checkpoint, name, token, body.step, body.path)
    return CheckpointBody.model_validate(record)
