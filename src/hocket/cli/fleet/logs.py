"""``hocket fleet logs``: what a job printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hocket.base.errors import UsageError
from hocket.cli.fleet.connection import follow, job_argument, with_service
from hocket.cli.fleet.submit import write_out
from hocket.cli.output import emit

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


@click.command("logs")
@job_argument
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on until the job has ended.")
@click.option("--attempt", type=click.IntRange(min=1), help="Which run. [default: the newest]")
@click.option("--tail", type=click.IntRange(min=0, max=100_000), help="Last lines only.")
@with_service
def command(
    client: FleetClient,
    job: int,
    follows: bool,
    attempt: int | None,
    tail: int | None,
    as_json: bool,
) -> None:
    """Print what a job wrote to standard output and error; -f begins with its first attempt."""
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
