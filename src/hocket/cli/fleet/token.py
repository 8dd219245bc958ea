"""``hocket fleet token`` and ``login``: make, list and remove tokens of users; sign a browser
in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import click

from hocket.cli.declare import argument, declare
from hocket.cli.fleet.connection import Service, show
from hocket.cli.output import answer, emit, say

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.group("token")
def command() -> None:
    """Tokens of users, which name the owner of a job; admins make and remove them."""


@declare("add", command)
def add(
    *,
    service: Service,
    name: Annotated[str, argument()],
    role: Annotated[
        Literal["admin", "user", "read-only", "agent"],
        "admin: everything; user: see all jobs, submit, change own jobs; read-only: see; "
        "agent: run jobs on the machine that is called NAME.",
    ] = "user",
    as_json: bool,
) -> None:
    """Make a token for NAME and print it; it is shown only once.

    Its owner puts it into HOCKET_FLEET_TOKEN, or signs in on the page with it.
    """
    client = service.connect()
    found = client.post("/v1/tokens", {"name": name, "role": role})
    if as_json:
        emit(found)
    else:
        say(f"the token of {name!r} follows; only a hash of it is kept")
        click.echo(found["token"])


@declare("list", command)
def list_them(
    *,
    service: Service,
    as_json: bool,
) -> None:
    """List who has a token."""
    client = service.connect()
    show(lambda: client.get("/v1/tokens"), _tokens_table, as_json=as_json)


def _tokens_table(found: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    from hocket.view.names import inert
    from hocket.view.table import Column, FittedTable, name

    if not found["tokens"]:
        return Text("nobody has a token but whoever runs the service")
    rows = [
        [
            inert(token["name"]),
            token["role"],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(token["made_s"])),
        ]
        for token in found["tokens"]
    ]
    columns = (name("name"), Column(title="role"), Column(title="made"))
    return FittedTable(columns=columns, rows=rows)


@declare("remove", command)
def remove(
    *,
    service: Service,
    name: Annotated[str, argument()],
    as_json: bool,
) -> None:
    """Remove the token of NAME and sign its browsers out; its jobs stay."""
    client = service.connect()
    # Names may contain a slash, which would otherwise be a path separator.
    client.delete(f"/v1/tokens/{quote(name, safe='')}")
    answer(as_json, {"name": name}, f"{name} has no token any more")


@declare("login")
def login(
    *,
    service: Service,
    as_json: bool,
) -> None:
    """Print an address that signs a browser in, once and within ten minutes."""
    client = service.connect()
    found = client.post("/v1/login-links")
    answer(as_json, found, found["url"])
