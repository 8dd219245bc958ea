"""Helpers of commands that talk to a service: its address, watching, following a job."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hocket.cli.output import console, emit, json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hocket.service.client import FleetClient

F = TypeVar("F", bound=Callable[..., Any])
WATCH_S = 1.0
_PAUSE_S = 0.3
_PATIENCE_S = 120.0
"""Time that ``--follow`` and ``--watch`` wait for a service that is restarted."""


def service_options(command: F) -> F:
    """``--state`` and ``--url``: which service is meant."""
    state = click.option(
        "--state",
        type=click.Path(path_type=Path, file_okay=False),
        help="State folder of the service. [default: hocket/fleet below XDG_STATE_HOME]",
    )
    url = click.option(
        "--url", help="Address of a service elsewhere; its token is taken from HOCKET_FLEET_TOKEN."
    )
    return state(url(command))


def with_service(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--state``, ``--url`` and ``--json``; the command gets its service as ``client``."""

    @functools.wraps(command)
    def run(state: Path | None, url: str | None, **values: Any) -> None:
        command(client=connect(state, url), **values)

    return service_options(json_option(run))


def _job_number(ctx: click.Context, param: click.Parameter, text: str) -> int:
    from hocket.base.units import whole_number

    number = whole_number(text, 10**15)
    if not number:
        raise click.BadParameter(
            f"{text[:40]!r} is no number of a job; hocket fleet jobs lists them", ctx, param
        )
    return number


def _job_numbers(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> list[int]:
    return list(dict.fromkeys(_job_number(ctx, param, text) for text in texts))


jobs_argument = click.argument(
    "jobs", type=str, nargs=-1, required=True, callback=_job_numbers, metavar="ID..."
)
job_argument = click.argument("job", type=str, callback=_job_number, metavar="ID")
watch_option = click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")


def state_folder(state: Path | None) -> Path:
    """The state folder that was named, or the usual one."""
    from hocket.base.config import fleet_folder

    return fleet_folder() if state is None else state


def connect(state: Path | None, url: str | None) -> FleetClient:
    """The service that is meant."""
    from hocket.service.client import find_service

    return find_service(state_folder(state), url)


Look = Callable[[], dict[str, Any]]
Shown = Callable[[dict[str, Any]], "RenderableType"]


def show(look: Look, shown: Shown, *, as_json: bool, is_watched: bool = False) -> None:
    """Print an answer of the service as JSON or as a table, again and again where watched."""
    if is_watched:
        watch(look, shown, as_json=as_json)
    elif as_json:
        emit(look())
    else:
        console().print(shown(look()))


def watch(look: Look, shown: Shown, *, as_json: bool) -> None:
    """Show something again and again until Ctrl-C; as JSON, a line whenever it changed.

    A service that is restarted meanwhile is waited for.
    """
    from hocket.service.client import patiently

    def look_patiently() -> dict[str, Any]:
        found: dict[str, Any] = patiently(look, _PATIENCE_S)
        return found

    try:
        if as_json:
            _watch_lines(look_patiently)
        elif console().is_terminal:
            _watch_screen(look_patiently, shown)
        else:
            _watch_pages(look_patiently, shown)
    except KeyboardInterrupt:
        return


def _watch_lines(look: Look) -> None:
    last = ""
    while True:
        line = json.dumps(look(), allow_nan=False)
        if line != last:
            click.echo(line)
        last = line
        time.sleep(WATCH_S)


def _watch_pages(look: Look, shown: Shown) -> None:
    """Print one after the other, for a file or a pipe, which cannot be redrawn."""
    while True:
        console().print(shown(look()))
        click.echo()
        time.sleep(WATCH_S)


def _watch_screen(look: Look, shown: Shown) -> None:
    from rich.live import Live

    with Live(shown(look()), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(shown(look()), refresh=True)


def follow(client: FleetClient, number: int, write: Callable[[bytes], object]) -> dict[str, Any]:
    """Write the output of a job as it comes, attempt after attempt, until the job has ended.

    A service that is restarted meanwhile is waited for; nothing is written twice.
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
        # Asked before the output: that of an attempt which had ended by then is all there is.
        had_ended = _has_ended(client, number, attempt)
        try:
            for block in _output(client, number, attempt, start):
                write(block)
                start += len(block)
            is_whole = had_ended
        except UnreachableError:
            # The next question waits for the service to come back.
            continue


def _has_ended(client: FleetClient, number: int, attempt: int) -> bool:
    from hocket.service.client import job_path

    found = client.get_patiently(job_path(number, "/attempts"), _PATIENCE_S)
    return all(one["ended_s"] is not None for one in found["attempts"] if one["attempt"] == attempt)


def _output(client: FleetClient, number: int, attempt: int, start: int) -> Iterator[bytes]:
    from hocket.service.client import job_path

    return client.blocks(job_path(number, "/log"), attempt=attempt, start=start, follow=True)
