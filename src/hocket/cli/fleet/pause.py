"""``hocket fleet pause``: take the devices of a job away until it is resumed."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.fleet.connection import connect, job_argument, service_options
from hocket.cli.output import emit, json_option


@click.command("pause")
@job_argument
@service_options
@json_option
def command(job: int, state: Path | None, url: str | None, as_json: bool) -> None:
    """Take the devices of a job away until it is resumed."""
    from hocket.service.client import job_path

    client = connect(state, url)
    found = client.post(job_path(job, ":pause"))
    if as_json:
        emit(found)
    else:
        click.echo(f"job {job} is {found['status']}")
