"""Strict reading of one table of a hardware file: each value is checked where it is taken.

Every error names the file, the key and its place (``links[2].bandwidth``) and says what to write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hocket.errors import InputFileError, did_you_mean
from hocket.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds

MAX_TEXT = 2000
"""Longest text that a file may hold as one value."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/+@#-]{0,127}\Z")


@dataclass(frozen=True)
class Quantity:
    """How a quantity is written, and which values are believable."""

    parse: Callable[[str], float]
    least: float
    most: float
    plain_least: float
    """A number without a unit below this is taken for a forgotten unit."""
    plain_most: float
    unit: str
    example: str


BYTES = Quantity(parse_bytes, 1, 2**50, 2**20, 2**50, "bytes", "16GiB")
BANDWIDTH = Quantity(parse_bandwidth, 1e-9, 1e18, 1e4, 1e18, "bytes per second", "25GB/s")
SECONDS = Quantity(parse_seconds, 0.0, 1e6, 0.0, 1.0, "seconds", "10us")
FLOPS = Quantity(parse_flops, 1e-9, 1e21, 1e6, 1e21, "operations per second", "15.7TFLOP/s")


@dataclass(frozen=True)
class Table:
    """One table of a file, its place in it, and the keys that it may have."""

    data: Mapping[str, Any]
    place: str
    """Such as ``devices[0]``; empty for the top of the file."""
    where: str
    """The file."""

    @classmethod
    def of(cls, data: Any, place: str, where: str, known: Iterable[str]) -> Table:
        """The table, after refusing anything that is none and keys that are not known."""
        if not isinstance(data, Mapping):
            shown = place or "the file"
            raise InputFileError(
                f"{shown} must be a table of keys, not {_kind(data)}",
                where=where,
                hint=f"keys: {', '.join(known)}",
            )
        known = tuple(known)
        for key in data:
            if key not in known:
                at = f" in {place}" if place else ""
                raise InputFileError(
                    f"unknown key {_shown(key)}{at}",
                    where=where,
                    hint=did_you_mean(str(key)[:100], known),
                )
        return cls(data, place, where)

    def error(self, key: str, message: str, hint: str = "") -> InputFileError:
        """The error for one key of this table."""
        place = f"{self.place}.{key}" if self.place and key else self.place or key
        return InputFileError(f"{place}: {message}", where=self.where, hint=hint)

    def require(self, key: str, hint: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.data:
            at = f" in {self.place}" if self.place else ""
            raise InputFileError(f"key {key!r} is missing{at}", where=self.where, hint=hint)
        return self.data[key]

    def quantity(self, key: str, quantity: Quantity, default: float | None = None) -> float:
        """A number with a unit as text, or a plain number in base units."""
        hint = f"write it like {key} = {quantity.example!r}"
        if default is not None and key not in self.data:
            return default
        value = self.require(key, hint)
        if isinstance(value, str):
            try:
                number = quantity.parse(value)
            except (ValueError, OverflowError) as error:
                raise self.error(key, _first_clause(str(error)), hint) from None
            least, most = quantity.least, quantity.most
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            number = value
            least, most = quantity.plain_least, quantity.plain_most
        else:
            raise self.error(key, f"must be a quantity, not {_kind(value)}", hint)
        if not least <= number <= most:
            reason = (
                f"a plain number is in {quantity.unit}"
                if least > quantity.least or most < quantity.most
                else f"outside of {least:g} to {most:g} {quantity.unit}"
            )
            raise self.error(key, f"{_shown(value)} is not believable: {reason}", hint)
        return number

    def number(self, key: str, most: float, default: float) -> float:
        """A plain number from 0 to ``most``."""
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, not {_kind(value)}")
        if not (0 <= value <= most and math.isfinite(value)):
            raise self.error(key, f"{_shown(value)} is outside of 0 to {most:g}")
        return float(value)

    def integer(self, key: str, most: int) -> int | None:
        """A whole number from 1 to ``most``; None where the key is absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, not {_kind(value)}")
        if not 1 <= value <= most:
            raise self.error(key, f"{_shown(value)} is outside of 1 to {most}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where absent."""
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_kind(value)}")
        return value

    def text(self, key: str, default: str) -> str:
        """Any text of bearable length."""
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be text, not {_kind(value)}", f'write {key} = "…"')
        if len(value) > MAX_TEXT:
            raise self.error(key, f"has {len(value)} characters; at most {MAX_TEXT} are allowed")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise self.error(key, "has characters that cannot be written to a file")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first where absent."""
        value = self.text(key, choices[0])
        if value not in choices:
            raise self.error(key, f"unknown value {_shown(value)}", did_you_mean(value, choices))
        return value

    def name(self, key: str, default: str | None = None) -> str:
        """A name of a place, a kind or a link."""
        value = self.require(key, f'write {key} = "gpu0"') if default is None else default
        return self.checked_name(key, self.data.get(key, value))

    def checked_name(self, key: str, value: Any) -> str:
        """``value`` if it can be a name."""
        if not isinstance(value, str) or not _NAME.match(value):
            raise self.error(
                key,
                f"{_shown(value)} cannot be a name",
                "use at most 128 letters, digits and _.:/+@#- without spaces",
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; empty where absent."""
        return tuple(self.checked_name(key, value) for value in self.items(key))

    def items(self, key: str) -> list[Any]:
        """A list of anything; empty where absent."""
        value = self.data.get(key, [])
        if not isinstance(value, (list, tuple)):
            raise self.error(key, f"must be a list, not {_kind(value)}")
        return list(value)

    def tables(self, key: str, known: tuple[str, ...]) -> list[Table]:
        """A list of tables (``[[key]]``); empty where absent."""
        value = self.data.get(key, [])
        if isinstance(value, Mapping):
            raise self.error(key, "must be a list of tables", f"write [[{key}]], not [{key}]")
        return [
            Table.of(item, f"{key}[{index}]", self.where, known)
            for index, item in enumerate(self.items(key))
        ]

    def table(self, key: str, known: tuple[str, ...]) -> Table | None:
        """A table below this one; None where absent."""
        if key not in self.data:
            return None
        place = f"{self.place}.{key}" if self.place else key
        return Table.of(self.data[key], place, self.where, known)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return f"the number {_shown(value)}"
    if isinstance(value, str):
        return f"the text {_shown(value)}"
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of over 30 digits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _first_clause(message: str) -> str:
    """The part of a unit error before its own advice, which the hint gives for this key."""
    text = message.split(";")[0]
    return text if len(text) <= 200 else text[:197] + "…"
