"""``hocket fleet cancel``, ``pause``, ``resume`` and ``drain``: change the state of jobs and
devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.fleet.connection import Jobs, Service
from hocket.cli.output import emit, say

if TYPE_CHECKING:
    from hocket.service.client import FleetClient


def _change_command(name: str, summary: str) -> click.Command:
    """Make a command that changes jobs. A job whose change is refused does not stop the others."""

    def change(
        *,
        service: Service,
        jobs: Jobs,
        whole_arrays: Annotated[
            bool, option("Also all other jobs of the arrays that they belong to.", "--array")
        ] = False,
        as_json: bool,
    ) -> None:
        from hocket.service.client import RefusedByServiceError, job_path

        client = service.connect()
        numbers = _with_arrays(client, jobs) if whole_arrays else list(dict.fromkeys(jobs))
        found: list[dict[str, Any]] = []
        refusals: list[RefusedByServiceError] = []
        for job in numbers:
            try:
                if name == "cancel":
                    found.append(client.delete(job_path(job)))
                else:
                    found.append(client.post(job_path(job, f":{name}")))
            except RefusedByServiceError as error:
                refusals.append(error)
                continue
            if not as_json:
                click.echo(f"job {job} is {found[-1]['status']}")
        # The last refusal is raised instead of printed, because it sets the exit code.
        for refusal in refusals[:-1]:
            say(f"error: {refusal.message}")
        if refusals:
            raise refusals[-1]
        if as_json:
            emit(found[0] if len(numbers) == 1 else {"jobs": found})

    return declare(name, help=summary)(change)


def _with_arrays(client: FleetClient, numbers: Iterable[int]) -> list[int]:
    """Numbers of the jobs, and of all unfinished jobs of the arrays that they belong to."""
    from hocket.service.client import job_path

    named = [client.get(job_path(number)) for number in numbers]
    arrays = {job["array_first"] for job in named} - {None}
    live = client.pages("/v1/jobs", "jobs", limit=1000, live=True)
    alone = {job["id"] for job in named if job["array_first"] is None}
    return sorted(alone | {job["id"] for job in live if job["array_first"] in arrays})


cancel = _change_command("cancel", "End jobs; those that run are told to stop first.")
pause = _change_command("pause", "Take the devices of jobs away until they are resumed.")
resume = _change_command("resume", "Let paused jobs have devices again.")


@declare("drain")
def drain(
    *,
    service: Service,
    name: Annotated[str, argument("HOST")],
    undo: Annotated[bool, "Let it take jobs again."] = False,
    as_json: bool,
) -> None:
    """Let machine HOST (or a device) take no new jobs; for admins.

    Jobs on it that save their work move to other devices; others stay until they end.
    """
    found = service.connect().post(f"/v1/devices:{'reopen' if undo else 'drain'}", {"name": name})
    if as_json:
        emit(found)
    else:
        word = "new jobs may run" if undo else "no new jobs run"
        click.echo(f"{word} on {', '.join(found['devices'])}")
