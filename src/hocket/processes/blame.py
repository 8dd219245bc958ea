"""Who failed first, and of what: a pure function of what was seen of each process."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hocket.base.errors import RunError

Cause = Literal["killed", "memory", "error", "silent", "exit", "another", "unknown"]

CONSEQUENCE = "communication"
"""The code of errors that only tell that another process is gone."""
_LIKELY: dict[Cause, int] = {
    "unknown": 0, "another": 1, "exit": 2, "silent": 3, "error": 4, "killed": 5, "memory": 5,
}  # fmt: skip
"""One that was killed is the cause rather than one that lost it."""
_CLEAR = _LIKELY["silent"]
_PERHAPS_MEMORY = "the system kills a process that takes too much memory; the kernel's log tells"
_SURELY_MEMORY = "the system ran out of memory meanwhile and killed a process: take less of it"


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What is seen of one process."""

    name: str
    """For people: ``rank 1 (gpu1)``."""
    doing: str = ""
    """What it did last, in words."""
    exit_code: int | None = None
    """As in `subprocess`; None while it runs."""
    error: Mapping[str, Any] | None = None
    """``kind`` and ``message`` of the failure that it told of."""
    is_done: bool = False
    silent_s: float | None = None
    """How long it has given no sign of life, where that is too long."""
    last_words: str = ""
    memory_ran_out: bool = False
    """Whether the system has killed some process for want of memory since the start."""


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Which process failed, and of what."""

    index: int
    """Of the process in its crew."""
    name: str
    cause: Cause
    message: str
    hint: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether this is a cause; what is not may be the consequence of another one."""
        return _LIKELY[self.cause] >= _CLEAR


class ProcessError(RunError):
    """A process of ours failed."""

    def __init__(self, blame: Blame) -> None:
        super().__init__(blame.message, hint=blame.hint)
        self.blame = blame


def blame(sightings: Sequence[Sighting]) -> Blame:
    """The one that failed first, as far as can be told."""
    found = [_blame_of(index, seen) for index, seen in enumerate(sightings)]
    return max(found, key=lambda one: _LIKELY[one.cause])


def _blame_of(index: int, seen: Sighting) -> Blame:
    cause, text, hint = _cause(seen)
    return Blame(index=index, name=seen.name, cause=cause, message=f"{seen.name}{text}", hint=hint)


def _cause(seen: Sighting) -> tuple[Cause, str, str]:
    doing = f" while {seen.doing}" if seen.doing else ""
    code, error = seen.exit_code, seen.error
    if code is not None and code < 0:
        text = f" was killed by signal {-code} ({_signal_name(-code)}){doing}"
        if code != -signal.SIGKILL:
            return "killed", f"{text}{_words(seen)}", ""
        return ("memory", text, _SURELY_MEMORY) if seen.memory_ran_out else (
            "killed", text, _PERHAPS_MEMORY)  # fmt: skip
    if error is not None and error["kind"] != CONSEQUENCE:
        return "error", f" failed{doing}: {error['message']}", ""
    if seen.silent_s is not None:
        return "silent", f" has stopped answering for {seen.silent_s:.0f} s{doing}", ""
    if error is not None:
        return "another", f": {error['message']}{doing}", ""
    if code is not None and not seen.is_done:
        return "exit", f" ended with code {code}{doing}{_words(seen)}", ""
    return "unknown", f": unknown failure{doing}", ""


def _words(seen: Sighting) -> str:
    return f": {seen.last_words}" if seen.last_words else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
