"""``hocket fleet token``: who may use the service, and under which name."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from hocket.cli.fleet.connection import connect, service_options
from hocket.cli.output import console, emit, json_option, say


@click.group("token")
def command() -> None:
    """Tokens of users, whose jobs carry their names; admins make and remove them."""


@command.command("add")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["admin", "user", "read-only", "agent"]),
    default="user",
    show_default=True,
    help="admin: everything; user: see all jobs, submit, change own jobs; read-only: see; agent: "
    "run jobs on the machine that is called NAME.",
)
@service_options
@json_option
def add(name: str, role: str, state: Path | None, url: str | None, as_json: bool) -> None:
    """Make a token for NAME and print it; nobody can see it again.

    Its owner puts it into HOCKET_FLEET_TOKEN, or signs in on the page with it.
    """
    found = connect(state, url).post("/v1/tokens", {"name": name, "role": role})
    if as_json:
        emit(found)
    else:
        say(f"the token of {name!r} follows; only a hash of it is kept")
        click.echo(found["token"])


@command.command("list")
@service_options
@json_option
def list_them(state: Path | None, url: str | None, as_json: bool) -> None:
    """List who has a token."""
    found = connect(state, url).get("/v1/tokens")
    if as_json:
        emit(found)
        return
    from hocket.cli.fleet.tables import tokens_table

    console().print(tokens_table(found["tokens"]))


@command.command("remove")
@click.argument("name")
@service_options
@json_option
def remove(name: str, state: Path | None, url: str | None, as_json: bool) -> None:
    """Take the token of NAME away, and sign its browsers out; its jobs stay."""
    connect(state, url).delete(f"/v1/tokens/{quote(name, safe='')}")
    if as_json:
        emit({"name": name})
    else:
        click.echo(f"{name} has no token any more")
