"""``hocket fleet devices``: what there is and who has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.fleet.connection import connect, service_options, watch_option
from hocket.cli.fleet.connection import watch as watch_it
from hocket.cli.output import console, emit, json_option

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("devices")
@watch_option
@service_options
@json_option
def command(watch: bool, state: Path | None, url: str | None, as_json: bool) -> None:
    """List the devices of the service and the jobs on them."""
    client = connect(state, url)

    def look() -> dict[str, Any]:
        found: dict[str, Any] = client.get("/v1/devices")
        return found

    if watch:
        watch_it(look, _shown, as_json=as_json)
    elif as_json:
        emit(look())
    else:
        console().print(_shown(look()))


def _shown(found: dict[str, Any]) -> RenderableType:
    from hocket.cli.fleet.tables import devices_table

    return devices_table(found["devices"])
