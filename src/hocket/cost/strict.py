"""Reading records of untrusted files: every key known, every value of its type and in range."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hocket.errors import InputFileError, did_you_mean


def record(
    value: object, where: str, required: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """The value as an object that has all required keys and no unknown one."""
    if not isinstance(value, Mapping):
        raise InputFileError(
            f"expected an object, got {_described(value)}",
            hint=f"write an object with the keys {', '.join(required)}",
            where=where,
        )
    for key in value:
        if key not in required and key not in optional:
            hint = did_you_mean(str(key), [*required, *optional])
            raise InputFileError(f"unknown key {key!r}", hint=hint, where=where)
    for key in required:
        if key not in value:
            raise InputFileError(f"key {key!r} is missing", hint="add it", where=where)
    return value


def table(value: object, where: str) -> Mapping[str, Any]:
    """The value as an object whose keys are names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputFileError(
            f"expected an object, got {_described(value)}",
            hint="write names to values",
            where=where,
        )
    return value


def items(value: object, where: str) -> list[Any]:
    """The value as a list."""
    if not isinstance(value, list):
        raise InputFileError(
            f"expected a list, got {_described(value)}", hint="write a list", where=where
        )
    return value


def number(value: object, where: str, low: float = 0.0, high: float = 1e300) -> float:
    """The value as a finite number between two bounds."""
    # Python takes true for 1; a file that says so means something else.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputFileError(
            f"expected a number, got {_described(value)}", hint="write a number", where=where
        )
    if not low <= value <= high:
        raise InputFileError(
            f"{value!r} is out of range", hint=f"between {low:g} and {high:g}", where=where
        )
    return float(value)


def whole(value: object, where: str, low: int = 0, high: int = 2**62) -> int:
    """The value as an integer between two bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputFileError(
            f"expected a whole number, got {_described(value)}",
            hint="write it without a point",
            where=where,
        )
    if not low <= value <= high:
        raise InputFileError(
            f"{value!r} is out of range", hint=f"between {low} and {high}", where=where
        )
    return value


def text(value: object, where: str, known: Collection[str] = ()) -> str:
    """The value as text, one of ``known`` where that is given."""
    if not isinstance(value, str):
        raise InputFileError(
            f"expected a text, got {_described(value)}", hint="put it in quotes", where=where
        )
    if known and value not in known:
        raise InputFileError(
            f"unknown name {value!r}", hint=did_you_mean(value, known), where=where
        )
    return value


def flag(value: object, where: str) -> bool:
    """The value as true or false."""
    if not isinstance(value, bool):
        raise InputFileError(
            f"expected true or false, got {_described(value)}", hint="write one", where=where
        )
    return value


def _described(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
