"""Routes of jobs: submit, list, look at, cancel, pause, resume, explain."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from hocket.base.errors import UsageError
from hocket.service.daemon.commands import Change
from hocket.service.daemon.daemon import Daemon
from hocket.service.errors import ConflictError
from hocket.service.records import ENDED, LIVE, JobRecord, JobStatus, ending_of
from hocket.service.rest.bodies import (
    After,
    AttemptBody,
    AttemptList,
    CheckpointBody,
    CheckpointList,
    ExplanationBody,
    JobBody,
    JobList,
    Limit,
    Number,
    job_body,
)
from hocket.service.rest.context import (
    FOR_USERS,
    TheDaemon,
    TheDecisions,
    TheForecaster,
    TheHolder,
)
from hocket.service.rest.problems import RefusedError, answers
from hocket.service.spec import JobSpec

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=FOR_USERS)

MAX_LIST_SIZE = 4_000_000
"""Characters of jobs after which a page ends: the command of a job may have a million."""
# Characters that a job takes besides its texts, about.
_USUAL_SIZE = 600
# Jobs that are read from the store at once.
_AT_ONCE = 100
# An ETag: the version of a job in quotes.
_TAG = re.compile(r'"(\d{1,15})"')
IfMatch = Annotated[
    str | None,
    Header(max_length=100, description="ETag of the job; refused with 412 if it has changed"),
]
Key = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="The same key and body again give the same job",
    ),
]


@router.post("", status_code=201, responses=answers(409, 415))
async def submit(
    spec: JobSpec,
    response: Response,
    daemon: TheDaemon,
    decisions: TheDecisions,
    holder: TheHolder,
    idempotency_key: Key = None,
) -> JobBody:
    """Submit a job. Once this is answered, the job is never lost."""
    daemon.config.check(spec, holder)
    record = await decisions.of(daemon.submit, spec, idempotency_key, owner=holder.name)
    response.headers["location"] = f"/v1/jobs/{record.number}"
    return _tagged(record, response)


@router.get("", responses=answers())
def list_jobs(
    daemon: TheDaemon,
    after: After = 0,
    limit: Limit = 100,
    status: Annotated[list[JobStatus] | None, Query(max_length=20)] = None,
    live: Annotated[bool, Query(description="Only jobs that have not ended")] = False,
    newest: Annotated[bool, Query(description="The last ones of these, on one page")] = False,
) -> JobList:
    """Jobs in order of their numbers, a page at a time."""
    wanted: set[JobStatus] = set(status or (*LIVE, *ENDED))
    if newest:
        if after or live:
            raise RefusedError(422, "newest goes with status and limit alone", code="usage")
        found = (record for one in wanted for record in daemon.store.newest_jobs(one, limit))
        last = sorted(found, key=lambda record: record.number)[-limit:]
        return JobList(jobs=[job_body(record) for record in last], next_after=None)
    if live:
        wanted &= set(LIVE)
    jobs: list[JobBody] = []
    size = 0
    for record in _found(daemon, after, limit + 1, wanted):
        if len(jobs) == limit or size > MAX_LIST_SIZE:
            return JobList(jobs=jobs, next_after=jobs[-1].id)
        jobs.append(job_body(record))
        size += _size(record)
    return JobList(jobs=jobs, next_after=None)


def _size(record: JobRecord) -> int:
    """About how many characters a job takes."""
    spec = record.spec
    texts = (*spec.command, *spec.resume, *spec.environment, *(spec.throughputs or ()))
    return _USUAL_SIZE + sum(map(len, texts)) + len(spec.folder or "")


def _found(daemon: Daemon, after: int, limit: int, wanted: set[JobStatus]) -> Iterable[JobRecord]:
    if wanted == {*LIVE, *ENDED}:
        return _stored(daemon, after)
    found = {
        number: record for number, record in daemon.service_state.jobs.items() if number > after
    }
    for status in sorted(wanted & set(ENDED)):
        found |= {record.number: record for record in daemon.store.jobs(after, limit, status)}
    # Records in memory predate the lookup of the others, so that no job is listed twice.
    numbers = sorted(number for number, record in found.items() if record.status in wanted)
    return [found[number] for number in numbers[:limit]]


def _stored(daemon: Daemon, after: int) -> Iterator[JobRecord]:
    while records := daemon.store.jobs(after, _AT_ONCE):
        # Records in memory take precedence: the store is a moment ahead of them, and no later
        # response may be older than an earlier one.
        yield from (daemon.service_state.jobs.get(record.number, record) for record in records)
        after = records[-1].number


@router.get("/{job}", responses=answers(404))
def get_job(job: Number, response: Response, daemon: TheDaemon) -> JobBody:
    """One job."""
    return _tagged(daemon.job(job), response)


_Decide = Callable[[Change], Awaitable[JobBody]]


async def _change(
    job: Number,
    response: Response,
    daemon: TheDaemon,
    decisions: TheDecisions,
    holder: TheHolder,
    if_match: IfMatch = None,
) -> _Decide:
    """Change that a request makes to the job that it names."""

    async def decide(change: Change) -> JobBody:
        only_of = holder.limited_to
        record = await decisions.of(_changed, daemon, change, job, if_match, only_of)
        return _tagged(record, response)

    return decide


TheChange = Annotated[_Decide, Depends(_change)]


@router.delete("/{job}", responses=answers(404, 409, 412))
async def cancel(change: TheChange) -> JobBody:
    """Cancel a job: it is stopped and does not start again."""
    return await change("cancel")


@router.post("/{job}:pause", responses=answers(404, 409, 412))
async def pause(change: TheChange) -> JobBody:
    """Take the devices of a job away until it is resumed."""
    return await change("pause")


@router.post("/{job}:resume", responses=answers(404, 409, 412))
async def resume(change: TheChange) -> JobBody:
    """Let a paused job have devices again."""
    return await change("resume")


@router.get("/{job}/attempts", responses=answers(404))
def list_attempts(job: Number, daemon: TheDaemon) -> AttemptList:
    """All runs of a job."""
    daemon.job(job)
    found = [AttemptBody.model_validate(record) for record in daemon.store.attempts(job)]
    return AttemptList(attempts=found)


@router.get("/{job}/checkpoints", responses=answers(404))
def list_checkpoints(job: Number, daemon: TheDaemon) -> CheckpointList:
    """All checkpoints of a job that count."""
    daemon.job(job)
    found = [CheckpointBody.model_validate(record) for record in daemon.store.checkpoints(job)]
    return CheckpointList(checkpoints=found)


@router.get("/{job}/explain", responses=answers(404))
def explain_job(job: Number, daemon: TheDaemon, forecaster: TheForecaster) -> ExplanationBody:
    """Explain why a job waits, in one sentence with the numbers and the expected start."""
    record = daemon.job(job)
    try:
        if record.status not in ENDED:
            found = forecaster.explain(daemon.state, daemon.now_s(), job).to_data()
            found["sentence"] = _with_progress(record, found["sentence"], daemon.trouble)
            return ExplanationBody(**found, status=record.status)
    except UsageError:
        # It ended between the two lookups.
        record = daemon.job(job)
    return ExplanationBody(
        job=job,
        status=record.status,
        sentence=ending_of(record),
        estimated_start_s=None,
        earliest_start_s=None,
        not_before_s=None,
        evidence={"attempt": record.attempt, "failures": record.failures},
    )


def _with_progress(record: JobRecord, sentence: str, trouble: str) -> str:
    """Describe the decision about a job, and how far it was executed."""
    if record.status == "starting":
        sentence = f"job {record.number} is starting on {', '.join(record.devices)}"
    if record.status == "stopping":
        sentence += f"; attempt {record.attempt} is still being stopped"
    return f"{sentence}; trouble: {trouble}" if trouble else sentence


def _changed(
    daemon: Daemon, change: Change, number: int, if_match: str | None, only_of: str | None
) -> JobRecord:
    version = _version(if_match)
    try:
        return daemon.change(change, number, version, only_of)
    except ConflictError as error:
        current = daemon.job(number).version
        if version is None or version == current:
            raise
        raise RefusedError(412, error.message, code=error.code, hint=error.hint) from None


def _tagged(record: JobRecord, response: Response) -> JobBody:
    response.headers["etag"] = f'"{record.version}"'
    return job_body(record)


def _version(if_match: str | None) -> int | None:
    """The version that a change asks for; None for any version."""
    if if_match is None or if_match.strip() == "*":
        return None
    match = _TAG.fullmatch(if_match.strip())
    if match is None:
        raise RefusedError(412, "this is no ETag of a job", hint='an ETag looks like "3"')
    return int(match[1])
