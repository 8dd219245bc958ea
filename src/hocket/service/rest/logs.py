"""The route of a job's output: whole, from a byte on, the last lines, or as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from hocket.service.daemon.daemon import Daemon
from hocket.service.daemon.log import Log
from hocket.service.errors import NotFoundError
from hocket.service.rest.bodies import MAX_NUMBER, Number
from hocket.service.rest.context import FOR_USERS, TheDaemon, TheNotifier
from hocket.service.rest.problems import answers
from hocket.service.rest.stream import EventNotifier, TimedStream

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=FOR_USERS)

# Bytes that are read at once, and the part of a log that is searched for its last lines.
_CHUNK_BYTES = 65536
_MAX_TAIL_BYTES = 16 * 2**20
# Interval at which a followed log is read.
_LOOK_S = 0.3
_TEXT = "text/plain; charset=utf-8"
_ANSWER = {"description": "The output", "content": {_TEXT: {"schema": {"type": "string"}}}}
# Sent to a reader who follows a log that was shortened.
_CUT = b"\n[hocket: the log was shortened here, and some of it is not shown]\n"


@router.get("/{job}/log", response_class=Response, responses={**answers(404), 200: _ANSWER})
async def read_log(
    job: Number,
    daemon: TheDaemon,
    event_notifier: TheNotifier,
    attempt: Annotated[
        int | None, Query(ge=1, le=MAX_NUMBER, description="The newest where left out")
    ] = None,
    tail: Annotated[int | None, Query(ge=0, le=100_000, description="Last lines only")] = None,
    start: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="First byte")] = 0,
    follow: Annotated[bool, Query(description="Go on until the attempt has ended")] = False,
) -> Response:
    """Output of an attempt, standard output and error together."""
    number = await run_in_threadpool(_attempt, daemon, job, attempt)
    log = await run_in_threadpool(daemon.log, job, number)
    size_bytes = await run_in_threadpool(log.size_bytes)
    if tail is not None:
        # All reads use the size measured above: what the job prints in the meantime must not push
        # its last lines out of reach.
        start = await run_in_threadpool(_tail_start, log, size_bytes, tail)
    headers = {"hocket-attempt": str(number)}
    if follow:
        content = _followed(daemon, event_notifier, job, number, log, start)
        return TimedStream(content, _TEXT, event_notifier=event_notifier, headers=headers)
    headers["content-length"] = str(max(size_bytes - start, 0))
    return TimedStream(_part(log, start, size_bytes), _TEXT, headers=headers)


def _attempt(daemon: Daemon, number: int, attempt: int | None) -> int:
    newest = daemon.job(number).attempt
    if newest == 0:
        raise NotFoundError(f"job {number} has not started", hint=f"hocket fleet explain {number}")
    if attempt is not None and attempt > newest:
        raise NotFoundError(f"job {number} has no attempt {attempt}")
    return attempt or newest


def _tail_start(log: Log, size_bytes: int, num_lines: int) -> int:
    """Offset of the last lines of the first ``size_bytes``; searches a bounded part only."""
    end = size_bytes - int(log.read(size_bytes - 1, 1) == b"\n") if size_bytes else 0
    start = end
    while start > max(size_bytes - _MAX_TAIL_BYTES, 0) and num_lines > 0:
        length = min(_CHUNK_BYTES, start)
        block = log.read(start - length, length)
        breaks = [at for at, byte in enumerate(block) if byte == 10]
        if len(breaks) >= num_lines:
            return start - length + breaks[-num_lines] + 1
        num_lines -= len(breaks)
        start -= length
    return start if num_lines else size_bytes


async def _part(log: Log, start: int, stop: int) -> AsyncGenerator[bytes, None]:
    while start < stop:
        length = min(stop - start, _CHUNK_BYTES)
        try:
            block = await run_in_threadpool(log.read, start, length)
        except NotFoundError:
            block = b""
        # The promised length must be kept even if the file was shortened or replaced meanwhile:
        # missing bytes are sent as line breaks.
        block = block or b"\n" * length
        start += len(block)
        yield block


async def _followed(
    daemon: Daemon, event_notifier: EventNotifier, job: int, attempt: int, log: Log, start: int
) -> AsyncGenerator[bytes, None]:
    while True:
        # Checked before reading: output that was written before the end is then still read.
        is_over = await run_in_threadpool(_has_ended, daemon, job, attempt)
        try:
            size_bytes = await run_in_threadpool(log.size_bytes)
            if size_bytes < start:
                # The log reached its limit and lost its middle, so that offsets have changed: go on
                # at its new end.
                start = size_bytes
                yield _CUT
            while block := await run_in_threadpool(log.read, start, _CHUNK_BYTES):
                start += len(block)
                yield block
        except NotFoundError as error:
            yield f"\n[hocket: {error.message}]\n".encode()
            return
        if is_over or event_notifier.is_closed:
            return
        await asyncio.sleep(_LOOK_S)


def _has_ended(daemon: Daemon, job: int, attempt: int) -> bool:
    found = [record for record in daemon.store.attempts(job) if record.attempt == attempt]
    return not found or found[0].ended_s is not None
