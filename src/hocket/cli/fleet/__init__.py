"""``hocket fleet``: many jobs share a mixed cluster.

Each subcommand lives in a module of this folder, which is imported when the command is used.
"""

from __future__ import annotations

import importlib

import click

from hocket.base.errors import unknown_name

_PLACES = {
    "allocate": "allocate", "simulate": "simulate", "throughputs": "throughputs",
    "serve": "serve", "agent": "agent", "submit": "submit", "jobs": "lists:jobs",
    "explain": "explain", "logs": "logs", "shell": "shell", "cancel": "change:cancel",
    "pause": "change:pause", "resume": "change:resume", "devices": "lists:devices",
    "drain": "change:drain", "usage": "lists:usage", "token": "token", "login": "token:login",
}  # fmt: skip
"""Module of each command, and its name there where that is not ``command``."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _PLACES:
            return None
        module, _, name = _PLACES[cmd_name].partition(":")
        found = importlib.import_module(f"{__name__}.{module}")
        command: click.Command = getattr(found, name or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _PLACES and not args[0].startswith("-"):
            raise unknown_name("command", args[0], _PLACES)
        return super().resolve_command(ctx, args)


@click.group("fleet", cls=_Lazy)
def command() -> None:
    """Share a cluster of mixed devices among many jobs."""
