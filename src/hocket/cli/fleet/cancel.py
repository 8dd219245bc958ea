"""``hocket fleet cancel``: end a job; one that runs is told to stop first."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.fleet.connection import connect, job_argument, service_options
from hocket.cli.output import emit, json_option


@click.command("cancel")
@job_argument
@service_options
@json_option
def command(job: int, state: Path | None, url: str | None, as_json: bool) -> None:
    """End a job; one that runs is told to stop first."""
    from hocket.service.client import job_path

    client = connect(state, url)
    found = client.delete(job_path(job))
    if as_json:
        emit(found)
    else:
        click.echo(f"job {job} is {found['status']}")
