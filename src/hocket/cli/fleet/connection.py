"""Helpers of commands that talk to a fleet service: finding it, watching an answer, following a
log.

All of them wait while a service is restarted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import FOLDER, argument, option
from hocket.cli.options import Parsed
from hocket.cli.output import console, emit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hocket.service.client import FleetClient

# Interval of --watch, pause of --follow between polls.
WATCH_S = 1.0
_PAUSE_S = 0.3
_PATIENCE_S = 120.0
"""Seconds that ``--follow`` and ``--watch`` wait for a service that is being restarted."""


def _parse_job(text: str) -> int:
    from hocket.base.units import whole_number

    number = whole_number(text, 10**15)
    if not number:
        raise ValueError(f"{text[:40]!r} is no number of a job; hocket fleet jobs lists them")
    return number


_JOB = Parsed("id", _parse_job)
Job = Annotated[int, argument("ID", type=_JOB)]
Jobs = Annotated[tuple[int, ...], argument("ID...", type=_JOB, nargs=-1, required=True)]
Watch = Annotated[bool, "Go on showing it until Ctrl-C."]


@dataclass(frozen=True)
class Service:
    """Options that name a service: its state folder on this machine, or its address."""

    state: Annotated[
        Path | None,
        option(
            "State folder of the service. [default: hocket/fleet below XDG_STATE_HOME]", type=FOLDER
        ),
    ] = None
    url: Annotated[
        str | None, "Address of a service elsewhere; its token is taken from HOCKET_FLEET_TOKEN."
    ] = None

    def connect(self) -> FleetClient:
        """Connect to the service."""
        from hocket.service.client import find_service

        return find_service(state_folder(self.state), self.url)


def state_folder(state: Path | None) -> Path:
    """The named state folder, or the default one."""
    from hocket.base.config import fleet_folder

    return fleet_folder() if state is None else state


Look = Callable[[], dict[str, Any]]
Shown = Callable[[dict[str, Any]], "RenderableType"]


def show(look: Look, shown: Shown, *, as_json: bool, is_watched: bool = False) -> None:
    """Print a service's answer as JSON or as a table; with ``is_watched`` repeat it until
    Ctrl-C."""
    if is_watched:
        watch(look, shown, as_json=as_json)
    elif as_json:
        emit(look())
    else:
        console().print(shown(look()))


def watch(look: Look, shown: Shown, *, as_json: bool) -> None:
    """Print an answer repeatedly until Ctrl-C; as JSON, print a line whenever it has changed.

    Waits while the service is restarted.
    """
    from rich.live import Live

    from hocket.service.client import patiently

    # A file or a pipe cannot be redrawn, so tables are printed one after the other.
    screen, last = console(), ""
    live = Live(console=screen, auto_refresh=False) if screen.is_terminal and not as_json else None
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            found = patiently(look, _PATIENCE_S)
            line = json.dumps(found, allow_nan=False) if as_json else ""
            if live is not None:
                live.update(shown(found), refresh=True)
            elif not as_json:
                screen.print(shown(found))
                click.echo()
            elif line != last:
                click.echo(line)
            last = line
            time.sleep(WATCH_S)


def follow(client: FleetClient, number: int, write: Callable[[bytes], object]) -> dict[str, Any]:
    """Write the output of a job as it appears, attempt by attempt, until the job has ended.

    Waits while the service is restarted. ``start`` counts the bytes already written, so that
    nothing is written twice.
    """
    from hocket.service.client import UnreachableError, job_path
    from hocket.service.records import ENDED

    attempt, start, is_whole = 0, 0, True
    while True:
        job: dict[str, Any] = client.get_patiently(job_path(number), _PATIENCE_S)
        if is_whole and job["attempt"] == attempt and job["status"] in ENDED:
            return job
        if is_whole and job["attempt"] > attempt:
            attempt, start, is_whole = attempt + 1, 0, False
        if is_whole:
            time.sleep(_PAUSE_S)
            continue
        # Queried before the output: if the attempt has ended at this point, the output read next is
        # complete. In the other order the last bytes could be lost.
        had_ended = _has_ended(client, number, attempt)
        try:
            for block in _output(client, number, attempt, start):
                write(block)
                start += len(block)
            is_whole = had_ended
        except UnreachableError:
            # The next call of get_patiently waits for the service to come back.
            continue


def _has_ended(client: FleetClient, number: int, attempt: int) -> bool:
    from hocket.service.client import job_path

    found = client.get_patiently(job_path(number, "/attempts"), _PATIENCE_S)
    return all(one["ended_s"] is not None for one in found["attempts"] if one["attempt"] == attempt)


def _output(client: FleetClient, number: int, attempt: int, start: int) -> Iterator[bytes]:
    from hocket.service.client import job_path

    return client.blocks(job_path(number, "/log"), attempt=attempt, start=start, follow=True)
