"""``hocket fleet``: many jobs share a mixed cluster.

Each subcommand is a module of this folder with a ``command``, imported when it is used.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from hocket.errors import unknown_name

_ORDER = ("allocate", "simulate", "serve", "submit", "jobs", "explain")
"""Known subcommands first, in this order; the others follow by name."""


def _names() -> list[str]:
    found = {path.stem for path in Path(__file__).parent.glob("*.py") if path.stem[0] != "_"}
    first = [name for name in _ORDER if name in found]
    return first + sorted(found.difference(first))


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return _names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _names():
            return None
        module = importlib.import_module(f"hocket.cli.fleet.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _names() and not args[0].startswith("-"):
            raise unknown_name("command", args[0], _names())
        return super().resolve_command(ctx, args)


@click.group("fleet", cls=_Lazy)
def command() -> None:
    """Share a cluster of mixed devices among many jobs."""
