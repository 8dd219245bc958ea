"""Read typed values from untrusted files: each value is checked, and errors name its key.

``path`` is the position in the file, such as ``ops.flops``; `located` adds the file name. Columns
are checked as a whole by numpy; only an invalid column is searched for its invalid entry.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.errors import InputFileError, did_you_mean

Known = TypeVar("Known", bound=str)
MAX_SHOWN = 80
"""Maximum length of an invalid value in an error message."""
_MAX_KEYS = 12
"""Maximum number of keys in a hint."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
# reprlib shows six entries per level, so a few levels would already be thousands of entries.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


# ── places and errors ────────────────────────────────────────────────────────────────────────────


@contextmanager
def located(where: str) -> Iterator[None]:
    """Add the file name to errors that were raised without one."""
    try:
        yield
    except InputFileError as error:
        raise InputFileError(error.message, hint=error.hint, where=error.where or where) from None


def inside(path: str, name: object) -> str:
    """Path of a key that comes from the file itself, and may be any text of any length."""
    is_plain = isinstance(name, str) and _PLAIN_NAME.fullmatch(name)
    return f"{path}.{name}" if is_plain else f"{path}[{shown(name)}]"


def shown(value: object) -> str:
    """Representation of a value in errors, shortened by size and depth."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        # Python refuses to print integers of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def wrong(path: str, value: object, expected: str) -> InputFileError:
    """Error for a value other than expected."""
    return InputFileError(f"{path} is {shown(value)}", hint=f"expected {expected}")


def missing(path: str, key: str, hint: str = "") -> InputFileError:
    """Error for a missing key."""
    return InputFileError(f"{path} has no key {key!r}", hint=hint or f"add {key!r}")


# ── objects and lists ────────────────────────────────────────────────────────────────────────────


def record(
    value: object, path: str, *, required: Collection[str] = (), optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """Check that a value is an object with all required keys and no unknown keys."""
    if not isinstance(value, Mapping):
        known = [*required, *optional]
        keys = ", ".join(known[:_MAX_KEYS]) + (", …" if len(known) > _MAX_KEYS else "")
        raise wrong(path, value, f"an object with the keys {keys}")
    for key in value:
        if key not in required and key not in optional:
            hint = did_you_mean(str(key), (*required, *optional))
            raise InputFileError(f"unknown key {shown(key)} in {path}", hint=hint)
    for key in required:
        if key not in value:
            raise missing(path, key)
    return value


def mapping(value: object, path: str) -> Mapping[str, Any]:
    """Check that a value is an object with arbitrary text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong(path, value, "an object of names and their values")
    return value


def items(value: object, path: str) -> list[Any]:
    """Check that a value is a list."""
    if not isinstance(value, list):
        raise wrong(path, value, "a list")
    return value


def sized(value: object, path: str, length: int, hint: str) -> list[Any]:
    """Check that a list has ``length`` entries; ``hint`` explains what the entries correspond
    to."""
    entries = items(value, path)
    if len(entries) != length:
        raise InputFileError(f"{path} has {len(entries)} entries, expected {length}", hint=hint)
    return entries


# ── single values ────────────────────────────────────────────────────────────────────────────────


def text(value: object, path: str) -> str:
    """Check that a value is a string."""
    if not isinstance(value, str):
        raise wrong(path, value, "a text in quotes")
    return value


def choice(value: object, path: str, known: Collection[Known]) -> Known:
    """Check that a value is one of the known strings."""
    for name in known:
        if value == name:
            return name
    if len(known) == 1:
        # A single possible value is a format or schema version: a "did you mean" hint would
        # mislead.
        raise wrong(path, value, repr(next(iter(known))))
    hint = did_you_mean(value if isinstance(value, str) else "", known)
    raise InputFileError(f"{path} is {shown(value)}", hint=hint)


def is_number(value: object) -> TypeGuard[int | float]:
    """True for numbers except booleans, which Python counts as integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def integer(value: object, path: str, low: int, high: int) -> int:
    """Check that a value is an integer between ``low`` and ``high``, inclusive."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise wrong(path, value, f"an integer from {low} to {high}")


def number(value: object, path: str, low: float, high: float) -> float:
    """Check that a value is a number between ``low`` and ``high``, inclusive."""
    if is_number(value) and low <= value <= high:
        return float(value)
    raise wrong(path, value, f"a number from {low:g} to {high:g}")


def flag(value: object, path: str) -> bool:
    """Check that a value is a boolean."""
    if not isinstance(value, bool):
        raise wrong(path, value, "true or false")
    return value


def flag_or_bit(value: object, path: str) -> bool:
    """Check that a value is a boolean, or 1 or 0, which some programs write."""
    return bool(value) if type(value) is int and value in (0, 1) else flag(value, path)


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def text_column(value: object, path: str) -> list[str]:
    """Check that a value is a list of strings."""
    texts = items(value, path)
    if set(map(type, texts)) <= {str}:
        return texts
    return [text(entry, f"{path}[{index}]") for index, entry in enumerate(texts)]


def int_column(value: object, path: str, low: int, high: int) -> LongArray:
    """Check that a value is a list of integers between ``low`` and ``high``; return it as an
    array."""
    numbers = items(value, path)
    array: LongArray | None = _as_array(numbers, {int}, np.int64)
    if array is not None and np.all((array >= low) & (array <= high)):
        return array
    checked = [integer(n, f"{path}[{index}]", low, high) for index, n in enumerate(numbers)]
    return np.array(checked, dtype=np.int64)


def float_column(value: object, path: str, low: float, high: float) -> FloatArray:
    """Check that a value is a list of numbers between ``low`` and ``high``; return it as an
    array."""
    numbers = items(value, path)
    array: FloatArray | None = _as_array(numbers, {int, float}, np.float64)
    if array is not None and np.all((array >= low) & (array <= high)):
        return array
    checked = [number(n, f"{path}[{index}]", low, high) for index, n in enumerate(numbers)]
    return np.array(checked, dtype=np.float64)


def _as_array(numbers: list[Any], types: set[type], dtype: Any) -> Any:
    """Array of a list; None if an entry has another type or is too large."""
    if not set(map(type, numbers)) <= types:
        return None
    try:
        return np.array(numbers, dtype=dtype)
    except OverflowError:
        return None
