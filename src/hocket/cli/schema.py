"""``hocket schema``: the JSON Schema of hocket's files."""

from __future__ import annotations

import click

from hocket.cli.output import emit, json_option


@click.command("schema")
@click.argument("what", type=click.Choice(["plan"]))
@json_option
def command(what: str, as_json: bool) -> None:
    """Print the JSON Schema of a file format."""
    from hocket.plan.schema import json_schema

    emit(json_schema())
