"""``hocket fleet resume``: let a paused job have devices again."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.fleet.connection import connect, job_argument, service_options
from hocket.cli.output import emit, json_option


@click.command("resume")
@job_argument
@service_options
@json_option
def command(job: int, state: Path | None, url: str | None, as_json: bool) -> None:
    """Let a paused job have devices again."""
    from hocket.service.client import job_path

    client = connect(state, url)
    found = client.post(job_path(job, ":resume"))
    if as_json:
        emit(found)
    else:
        click.echo(f"job {job} is {found['status']}")
