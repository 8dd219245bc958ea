"""Typed values out of parsed JSON, with errors that name the key.

Columns are checked as a whole by numpy; only a column that is wrong is walked to find the entry to
blame. ``path`` is the place inside the file, such as ``ops.flops``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hocket.arrays import ByteArray, FloatArray
from hocket.errors import InputFileError, did_you_mean


@contextmanager
def located(where: str) -> Iterator[None]:
    """Add the name of the file to errors that were raised without one."""
    try:
        yield
    except InputFileError as error:
        raise InputFileError(error.message, hint=error.hint, where=error.where or where) from None


def checked_object(
    value: object, path: str, *, required: Collection[str] = (), optional: Collection[str] = ()
) -> dict[str, Any]:
    """An object with all of the required keys and none that is unknown."""
    if not isinstance(value, dict):
        raise wrong(path, value, "an object")
    for key in value:
        if key not in required and key not in optional:
            raise InputFileError(
                f"unknown key {key[:60]!r} in {path}",
                # A key of megabytes would keep the search for a similar one busy for hours.
                hint=did_you_mean(key[:60], [*required, *optional]),
            )
    for key in required:
        if key not in value:
            raise InputFileError(f"{path} has no key {key!r}", hint=f"add {key!r}")
    return value


def checked_list(value: object, path: str, length: int | None = None) -> list[Any]:
    """A list, of the given length where one is given."""
    if not isinstance(value, list):
        raise wrong(path, value, "a list")
    if length is not None and len(value) != length:
        raise InputFileError(
            f"{path} has {len(value)} entries, expected {length}",
            hint="every column has one entry per op or per tensor, or is left out",
        )
    return value


def checked_text(value: object, path: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise wrong(path, value, "a text")
    return value


def checked_int(value: object, path: str, low: int, high: int) -> int:
    """An integer between ``low`` and ``high``, both allowed."""
    if type(value) is int and low <= value <= high:
        return value
    raise wrong(path, value, f"an integer from {low} to {high}")


def checked_number(value: object, path: str, high: float) -> float:
    """A number between 0 and ``high``, both allowed."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= high:
        return float(value)
    raise wrong(path, value, f"a number from 0 to {high:g}")


def checked_flag(value: object, path: str) -> bool:
    """True or false, which some programs write as 1 or 0."""
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise wrong(path, value, "true or false")
    return bool(value)


def text_column(value: object, path: str, length: int | None = None) -> list[str]:
    """A list of texts."""
    texts = checked_list(value, path, length)
    if not set(map(type, texts)) <= {str}:
        index = next(i for i, text in enumerate(texts) if type(text) is not str)
        raise wrong(f"{path}[{index}]", texts[index], "a text")
    return texts


def int_column(
    value: object, path: str, low: int, high: int, length: int | None = None
) -> ByteArray:
    """A list of integers between ``low`` and ``high``, both allowed."""
    numbers = checked_list(value, path, length)
    if set(map(type, numbers)) <= {int}:
        array: ByteArray | None = _as_array(numbers, np.int64)
        if array is not None and np.all((array >= low) & (array <= high)):
            return array
    index = next(i for i, n in enumerate(numbers) if type(n) is not int or not low <= n <= high)
    raise wrong(f"{path}[{index}]", numbers[index], f"an integer from {low} to {high}")


def float_column(value: object, path: str, high: float, length: int | None = None) -> FloatArray:
    """A list of numbers between 0 and ``high``, both allowed."""
    numbers = checked_list(value, path, length)
    if set(map(type, numbers)) <= {int, float}:
        array: FloatArray | None = _as_array(numbers, np.float64)
        if array is not None and np.all((array >= 0) & (array <= high)):
            return array
    index = next(
        i for i, n in enumerate(numbers) if type(n) not in (int, float) or not 0 <= n <= high
    )
    raise wrong(f"{path}[{index}]", numbers[index], f"a number from 0 to {high:g}")


def _as_array(numbers: list[Any], dtype: Any) -> Any:
    try:
        return np.array(numbers, dtype=dtype)
    except OverflowError:
        return None


def wrong(path: str, value: object, expected: str) -> InputFileError:
    """The error for a value that is not what it should be."""
    return InputFileError(f"{path} is {reprlib.repr(value)}", hint=f"expected {expected}")
