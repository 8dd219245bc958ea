"""All errors for users, and the exit code with which each ends a command.

    HocketError               1  a bug in hocket, or not yet classified
    ├── UsageError            2  a name, an option or an argument is wrong
    │   └── MissingExtraError 2  an optional dependency is not installed
    ├── InputFileError        3  an input file cannot be used
    ├── NoFeasiblePlanError   4  nothing that was tried fits the hardware
    ├── RunError              5  running a plan failed
    ├── CheckError            6  a check found a violation
    └── InterruptedByUserError 130  Ctrl-C

Messages start lower-case, quote the user's text with ``!r`` and have no trailing period. ``hint``
says what to do, ``where`` names the file, key, op or device.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_COMPARED = 100
"""Longest name for which a similar one is searched, because the search is quadratic: a name of
megabytes would take hours.
"""


class HocketError(Exception):
    """Base of all errors that hocket raises on purpose."""

    code = "internal"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"\nhint: {self.hint}" if self.hint else ""
        return f"{place}{self.message}{advice}"

    def as_dict(self) -> dict[str, str]:
        """The error as ``--json`` prints it."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "where": self.where,
        }


class UsageError(HocketError):
    """A name, an option or an argument is wrong."""

    code = "usage"
    exit_code = 2


class MissingExtraError(UsageError):
    """A command needs an optional dependency that is not installed."""

    code = "missing-extra"


class InputFileError(HocketError):
    """An input file cannot be used."""

    code = "bad-input"
    exit_code = 3


class NoFeasiblePlanError(HocketError):
    """No candidate fits the hardware."""

    code = "no-feasible-plan"
    exit_code = 4


class RunError(HocketError):
    """Running a plan failed."""

    code = "run-failed"
    exit_code = 5


class CheckError(HocketError):
    """A check found a violation."""

    code = "check-failed"
    exit_code = 6


class InterruptedByUserError(HocketError):
    """The user stopped the command."""

    code = "interrupted"
    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint with the closest known name, or with a list of the known names if none is close."""
    names = sorted(known)
    close = _closest(name[:_MAX_COMPARED], names)
    if close:
        return f"did you mean {close!r}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else ""


def _closest(name: str, names: list[str]) -> str:
    """Most similar known name; names with the same first part (before ``-``) are preferred."""
    first, _, _ = name.partition("-")
    family = [known for known in names if known.partition("-")[0] == first]
    close = difflib.get_close_matches(name, family, n=1, cutoff=0.0) if first else []
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else ""


def unknown_name(what: str, name: str, known: Iterable[str], *, where: str = "") -> UsageError:
    """Error for a name that is not in a registry."""
    return UsageError(f"unknown {what} {name!r}", hint=did_you_mean(name, known), where=where)


_LONGEST_LINE = 400


def one_line(error: BaseException) -> str:
    """Format any exception in one line: its class and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:_LONGEST_LINE]


def system_reason(error: BaseException) -> str:
    """Reason of an operating system error, without the file name."""
    return getattr(error, "strerror", None) or str(error)
