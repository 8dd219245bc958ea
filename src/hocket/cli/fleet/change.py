"""Commands that change jobs and say what each is then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.fleet.connection import connect, jobs_argument, service_options
from hocket.cli.output import emit, json_option, say

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


def change_command(
    name: str, summary: str, change: Callable[[FleetClient, int], dict[str, Any]]
) -> click.Command:
    """The command ``name``; ``change`` asks the service and answers with the job.

    One that cannot be changed does not keep the others from it.
    """

    @click.command(name, help=summary)
    @jobs_argument
    @service_options
    @json_option
    def command(jobs: list[int], state: Path | None, url: str | None, as_json: bool) -> None:
        from hocket.api.service import RefusedByServiceError

        client = connect(state, url)
        found: list[dict[str, Any]] = []
        refusals: list[RefusedByServiceError] = []
        for job in jobs:
            try:
                found.append(change(client, job))
            except RefusedByServiceError as error:
                refusals.append(error)
                continue
            if not as_json:
                click.echo(f"job {job} is {found[-1]['status']}")
        for refusal in refusals[:-1]:
            say(f"error: {refusal.message}")
        if refusals:
            raise refusals[-1]
        if as_json:
            emit(found[0] if len(jobs) == 1 else {"jobs": found})

    return command
