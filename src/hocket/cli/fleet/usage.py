"""``hocket fleet usage``: device hours of users and teams."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.fleet.connection import connect, service_options
from hocket.cli.output import console, emit, json_option


@click.command("usage")
@click.option("--weeks", type=click.IntRange(1, 520), default=4, show_default=True,
              help="This week and as many before.")  # fmt: skip
@service_options
@json_option
def command(weeks: int, state: Path | None, url: str | None, as_json: bool) -> None:
    """List device hours by week, user, team and device type."""
    found = connect(state, url).get("/v1/usage", weeks=weeks)
    if as_json:
        emit(found)
        return
    from hocket.cli.fleet.tables import usage_table

    console().print(usage_table(found["usage"]))
