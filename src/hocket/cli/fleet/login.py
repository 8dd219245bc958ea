"""``hocket fleet login``: a link that opens the page in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.fleet.connection import connect, service_options
from hocket.cli.output import emit, json_option


@click.command("login")
@service_options
@json_option
def command(state: Path | None, url: str | None, as_json: bool) -> None:
    """Print an address that signs a browser in, once and within ten minutes."""
    found = connect(state, url).post("/v1/login-links")
    if as_json:
        emit(found)
    else:
        click.echo(found["url"])
