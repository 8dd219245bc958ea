"""Commands that change one job and say what it is then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.fleet.connection import connect, job_argument, service_options
from hocket.cli.output import emit, json_option

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


def change_command(
    name: str, summary: str, change: Callable[[FleetClient, int], dict[str, Any]]
) -> click.Command:
    """The command ``name``; ``change`` asks the service and answers with the job."""

    @click.command(name, help=summary)
    @job_argument
    @service_options
    @json_option
    def command(job: int, state: Path | None, url: str | None, as_json: bool) -> None:
        found = change(connect(state, url), job)
        if as_json:
            emit(found)
        else:
            click.echo(f"job {job} is {found['status']}")

    return command
