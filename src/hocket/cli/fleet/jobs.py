"""``hocket fleet jobs``: what waits, runs and ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.fleet.connection import connect, service_options, watch_option
from hocket.cli.fleet.connection import watch as watch_it
from hocket.cli.output import console, emit, json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

_PAGE = 1000
_MAX_FAILED = 20
_RECENT_S = 24 * 3600.0


@click.command("jobs")
@click.option("--all", "is_all", is_flag=True, help="Also jobs that have ended.")
@watch_option
@service_options
@json_option
def command(is_all: bool, watch: bool, state: Path | None, url: str | None, as_json: bool) -> None:
    """List the jobs of the service that wait or run, and those that failed since yesterday."""
    client = connect(state, url)

    def look() -> dict[str, Any]:
        if is_all:
            return {"jobs": list(client.pages("/v1/jobs", "jobs", limit=_PAGE))}
        found = client.get("/v1/jobs", status="failed", newest=True, limit=_MAX_FAILED)["jobs"]
        failed = {job["id"]: job for job in found if job["ended_s"] > time.time() - _RECENT_S}
        live = {job["id"]: job for job in client.pages("/v1/jobs", "jobs", limit=_PAGE, live=True)}
        return {"jobs": [job for _, job in sorted((live | failed).items())]}

    def shown(found: dict[str, Any]) -> RenderableType:
        from hocket.cli.fleet.tables import jobs_table

        return jobs_table(found["jobs"], time.time(), is_all)

    if watch:
        watch_it(look, shown, as_json=as_json)
    elif as_json:
        emit(look())
    else:
        console().print(shown(look()))
