"""``hocket fleet logs``: print the output of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import click

from hocket.base.errors import UsageError
from hocket.cli.declare import declare, option
from hocket.cli.fleet.connection import Job, Service, follow
from hocket.cli.fleet.submit import write_out
from hocket.cli.output import emit

if TYPE_CHECKING:
    pass


@declare("logs")
def command(
    *,
    service: Service,
    job: Job,
    follows: Annotated[bool, option("Go on until the job has ended.", "-f", "--follow")] = False,
    attempt: Annotated[
        int | None, option("Which run. [default: the newest]", type=click.IntRange(min=1))
    ] = None,
    tail: Annotated[
        int | None, option("Last lines only.", type=click.IntRange(min=0, max=100_000))
    ] = None,
    as_json: bool,
) -> None:
    """Print what a job wrote to standard output and error; -f begins with its first attempt."""
    client = service.connect()
    from hocket.service.client import job_path

    if follows and (attempt is not None or tail is not None):
        raise UsageError("--follow shows all attempts", hint="leave out --attempt and --tail")
    parts: list[bytes] = []
    write = parts.append if as_json else write_out
    if follows:
        follow(client, job, write)
    else:
        for block in client.blocks(job_path(job, "/log"), attempt=attempt, tail=tail):
            write(block)
    if as_json:
        emit({"job": job, "log": b"".join(parts).decode("utf-8", "replace")})
