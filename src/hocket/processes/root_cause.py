"""Determine which worker failed first and why, from observations of all workers."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hocket.base.errors import RunError

Cause = Literal["killed", "memory", "error", "silent", "exit", "another", "unknown"]

CONSEQUENCE = "communication"
"""Kind of errors that only report the loss of another worker."""
_LIKELY: dict[Cause, int] = {
    "unknown": 0, "another": 1, "exit": 2, "silent": 3, "error": 4, "killed": 5, "memory": 5,
}  # fmt: skip
"""Likelihood that a cause is the root cause: a killed worker is one, a worker that lost its peer is
not.
"""
_CLEAR = _LIKELY["silent"]
_PERHAPS_MEMORY = "the system kills a process that takes too much memory; see the kernel's log"
_SURELY_MEMORY = "the system ran out of memory and killed a process: use less memory"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """State of one worker as observed by its parent."""

    name: str
    """Display name: ``rank 1 (gpu1)``."""
    doing: str = ""
    """Description of the worker's last activity."""
    exit_code: int | None = None
    """Exit code as in `subprocess`; None while the process runs."""
    error: Mapping[str, Any] | None = None
    """``kind`` and ``message`` of the error that the worker reported."""
    is_done: bool = False
    silent_s: float | None = None
    """Seconds since the last heartbeat if that is too long; else None."""
    last_words: str = ""
    memory_ran_out: bool = False
    """True if the system has killed a process for lack of memory since the start."""


@dataclass(frozen=True, kw_only=True)
class RootCause:
    """The worker that failed first, and the cause."""

    index: int
    """Index of the worker in its group."""
    name: str
    cause: Cause
    message: str
    hint: str = ""

    @property
    def is_clear(self) -> bool:
        """True if the cause cannot be a consequence of another worker's failure."""
        return _LIKELY[self.cause] >= _CLEAR


class ProcessError(RunError):
    """A worker process failed."""

    def __init__(self, root_cause: RootCause) -> None:
        super().__init__(root_cause.message, hint=root_cause.hint)
        self.root_cause = root_cause


def find_root_cause(observations: Sequence[Observation]) -> RootCause:
    """Return the most likely first failure."""
    found = [_root_cause_of(index, seen) for index, seen in enumerate(observations)]
    # max returns the first of equal maxima: the worker with the lowest index.
    return max(found, key=lambda one: _LIKELY[one.cause])


def _root_cause_of(index: int, seen: Observation) -> RootCause:
    cause, text, hint = _cause(seen)
    return RootCause(
        index=index, name=seen.name, cause=cause, message=f"{seen.name}{text}", hint=hint
    )


def _cause(seen: Observation) -> tuple[Cause, str, str]:
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


def _words(seen: Observation) -> str:
    return f": {seen.last_words}" if seen.last_words else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
