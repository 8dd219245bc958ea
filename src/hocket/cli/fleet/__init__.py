"""``hocket fleet``: the group of commands about many jobs on a shared cluster of mixed devices."""

from __future__ import annotations

import click

from hocket.cli.declare import LazyGroup

_PLACES = {
    "allocate": "allocate", "simulate": "simulate", "throughputs": "throughputs",
    "serve": "serve", "agent": "agent", "submit": "submit", "jobs": "lists:jobs",
    "explain": "explain", "logs": "logs", "shell": "shell", "cancel": "change:cancel",
    "pause": "change:pause", "resume": "change:resume", "devices": "lists:devices",
    "drain": "change:drain", "usage": "lists:usage", "token": "token", "login": "token:login",
}  # fmt: skip
"""Module of each command in this folder, and its name there where that is not ``command``."""


@click.group(
    "fleet",
    cls=LazyGroup,
    places={name: f"{__name__}.{place}" for name, place in _PLACES.items()},
)
def command() -> None:
    """Share a cluster of mixed devices among many jobs."""
