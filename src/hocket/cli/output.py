"""Output of all commands: results go to stdout, messages and errors to stderr.

Errors have one form in text and one in JSON. Long work shows a spinner, or lines in a log.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hocket.base.units import words_for_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

F = TypeVar("F", bound=Callable[..., Any])
FIRST_SPOKEN_S, SPOKEN_EVERY_S = 10.0, 60.0
"""Seconds until the first progress line in a log, and largest time between two lines."""


def wants_json(arguments: list[str]) -> bool:
    """True if the command line has ``--json``; errors of parsing need to know it before parsing."""
    before_end = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in before_end


def emit(result: Mapping[str, Any]) -> None:
    """Print a result as one JSON object on stdout."""
    # Escapes of JSON lose nothing on a terminal that cannot encode every character.
    is_ascii = "utf" not in (sys.stdout.encoding or "").lower()
    text = json.dumps(result, indent=2, ensure_ascii=is_ascii, allow_nan=False, default=_plain)
    # JSON files may contain a lone surrogate, which UTF-8 cannot encode; it is printed as an
    # escape.
    click.echo(text.encode(errors="backslashreplace").decode())


def answer(as_json: bool, data: Mapping[str, Any], *shown: str | RenderableType) -> None:
    """Print a result: ``data`` as JSON, or the texts and tables in ``shown``."""
    if as_json:
        emit(data)
        return
    for each in shown:
        if isinstance(each, str):
            click.echo(each)
        else:
            console().print(each)


def _plain(value: Any) -> Any:
    """JSON form of other types: paths as text, dataclasses as objects, arrays as lists."""
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value.tolist()


def fail(error: Exception, *, as_json: bool, extra: Mapping[str, Any] | None = None) -> int:
    """Print an error and return its exit code; ``extra`` are more keys of the JSON object."""
    from hocket.base.errors import HocketError

    known = error if isinstance(error, HocketError) else HocketError(str(error))
    if as_json:
        emit({"error": known.as_dict(), **(extra or {})})
    # Also with --json: a user who redirects stdout to a file still sees the error.
    say(f"hocket: {known}")
    return known.exit_code


def console(*, stderr: bool = False) -> Console:
    """Rich console; it prints no colours if the stream is not a terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def say(text: str) -> None:
    """Print a message on stderr, so that stdout contains results only."""
    from hocket.view.names import LONGEST_SENTENCE, inert

    # Messages quote names from files of unknown origin. Control characters in them could rewrite
    # the terminal.
    click.echo("\n".join(inert(line, LONGEST_SENTENCE) for line in text.split("\n")), err=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal; elsewhere print a line from time to time.

    Yields a function that changes the text, to report progress.
    """
    if not sys.stderr.isatty():
        with _spoken(what) as tell:
            yield tell
        return
    from rich.markup import escape

    with console(stderr=True).status(escape(what)) as status:
        yield lambda text: status.update(escape(text))


@contextmanager
def _spoken(what: str) -> Iterator[Callable[[str], None]]:
    """Print a progress line at growing intervals, for output that is no terminal."""
    begun_s, latest, is_done = time.monotonic(), [what], threading.Event()

    def speak() -> None:
        pause_s = FIRST_SPOKEN_S
        while not is_done.wait(min(pause_s, SPOKEN_EVERY_S)):
            say(f"{latest[0]} ({words_for_seconds(time.monotonic() - begun_s)} so far)")
            # The interval doubles, so that hours of work leave few lines in the log.
            pause_s *= 2

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield lambda text: latest.__setitem__(0, text)
    finally:
        is_done.set()
        thread.join()
