"""``hocket fleet drain``: let a machine take no new jobs."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.fleet.connection import connect, service_options
from hocket.cli.output import emit, json_option


@click.command("drain")
@click.argument("name", metavar="HOST")
@click.option("--undo", is_flag=True, help="Let it take jobs again.")
@service_options
@json_option
def command(name: str, undo: bool, state: Path | None, url: str | None, as_json: bool) -> None:
    """Let machine HOST (or a device) take no new jobs, for admins.

    Jobs on it that save their work leave for other devices; others stay until they end.
    """
    path = "/v1/devices:reopen" if undo else "/v1/devices:drain"
    found = connect(state, url).post(path, {"name": name})
    if as_json:
        emit(found)
    else:
        word = "take jobs again" if undo else "take no new jobs"
        click.echo(f"{', '.join(found['devices'])} {word}")
