"""``hocket fleet``: many jobs share a mixed cluster.

Each subcommand is a module of this folder with a ``command``, imported when it is used.
"""

from __future__ import annotations

import importlib

import click

from hocket.base.errors import unknown_name

_NAMES = (
    "allocate", "simulate", "throughputs", "serve", "agent", "submit", "jobs", "explain",
    "logs", "shell", "cancel", "pause", "resume", "devices", "drain", "usage", "token", "login",
)  # fmt: skip


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _NAMES:
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _NAMES and not args[0].startswith("-"):
            raise unknown_name("command", args[0], _NAMES)
        return super().resolve_command(ctx, args)


@click.group("fleet", cls=_Lazy)
def command() -> None:
    """Share a cluster of mixed devices among many jobs."""
