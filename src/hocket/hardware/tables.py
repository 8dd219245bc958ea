"""Typed access to the tables of a hardware file: quantities with units, names, lists of tables.

`hocket.base.fields` reads plain values. Every error names the key and its position in the file,
such as ``links[2].bandwidth``, and the expected form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.base.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds

MAX_TEXT = 2000
"""Maximum length of a text value."""
MAX_NAME = 128
"""Maximum length of the name of a place, a device type or a link."""
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:/+@#-]{{0,{MAX_NAME - 1}}}\Z")


@dataclass(frozen=True)
class Quantity:
    """Units of a quantity, and the range of accepted values."""

    parse: Callable[[str], float]
    least: float
    most: float
    plain_least: float
    """A number without unit below this value is an error, because its unit was probably forgotten.
    """
    plain_most: float
    unit: str
    example: str


BYTES = Quantity(parse_bytes, 1, 2**50, 2**20, 2**50, "bytes", "16GiB")
BANDWIDTH = Quantity(parse_bandwidth, 1e-9, 1e18, 1e4, 1e18, "bytes per second", "25GB/s")
SECONDS = Quantity(parse_seconds, 0.0, 1e6, 0.0, 1.0, "seconds", "10us")
FLOPS = Quantity(parse_flops, 1e-9, 1e21, 1e6, 1e21, "operations per second", "15.7TFLOP/s")


@dataclass(frozen=True)
class FileTable:
    """A table of a file and its position; `fields.located` adds the file's name to errors."""

    data: Mapping[str, Any]
    place: str
    """Position such as ``devices[0]``; empty for the top level."""

    @classmethod
    def of(cls, data: Any, place: str, known: Collection[str]) -> FileTable:
        """Check that ``data`` is a table whose keys are all in ``known``."""
        name = place or "the file"
        if not isinstance(data, Mapping):
            raise fields.wrong(name, data, f"a table with the keys {', '.join(known)}")
        return cls(fields.record(data, name, optional=known), place)

    def path(self, key: str) -> str:
        """Position of a key of this table; position of the table for an empty key."""
        return fields.inside(self.place, key) if self.place and key else self.place or key

    def error(self, key: str, message: str, hint: str = "") -> InputFileError:
        """Error for one key of this table."""
        return InputFileError(f"{self.path(key)}: {message}", hint=hint)

    def require(self, key: str, hint: str) -> Any:
        """Value of a required key."""
        if key not in self.data:
            raise fields.missing(self.place or "the file", key, hint)
        return self.data[key]

    def quantity(self, key: str, quantity: Quantity, default: float | None = None) -> float:
        """A quantity: text with a unit, or a plain number in base units."""
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
        elif fields.is_number(value):
            number = value
            least, most = quantity.plain_least, quantity.plain_most
        else:
            raise self.error(key, f"{fields.shown(value)} is not a quantity", hint)
        if not least <= number <= most:
            reason = (
                f"a plain number is in {quantity.unit}"
                if least > quantity.least or most < quantity.most
                else f"outside of {least:g} to {most:g} {quantity.unit}"
            )
            raise self.error(key, f"{fields.shown(value)} is out of range: {reason}", hint)
        return number

    def number(self, key: str, most: float, default: float) -> float:
        """A plain number from 0 to ``most``."""
        return fields.number(self.data.get(key, default), self.path(key), 0, most)

    def integer(self, key: str, most: int) -> int | None:
        """A whole number from 1 to ``most``; None if the key is absent."""
        value = self.data.get(key)
        return None if value is None else fields.integer(value, self.path(key), 1, most)

    def flag(self, key: str) -> bool:
        """A boolean; False if the key is absent."""
        return fields.flag(self.data.get(key, False), self.path(key))

    def text(self, key: str, default: str) -> str:
        """Any text of at most `MAX_TEXT` characters."""
        value = fields.text(self.data.get(key, default), self.path(key))
        if len(value) > MAX_TEXT:
            raise self.error(key, f"has {len(value)} characters; at most {MAX_TEXT} are allowed")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise self.error(key, "has characters that cannot be written to a file")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first one if the key is absent."""
        return fields.choice(self.data.get(key, choices[0]), self.path(key), choices)

    def name(self, key: str, default: str | None = None) -> str:
        """A name of a place, a kind or a link."""
        value = self.require(key, f'write {key} = "gpu0"') if default is None else default
        return self.checked_name(key, self.data.get(key, value))

    def checked_name(self, key: str, value: Any) -> str:
        """``value`` if it is a valid name; otherwise raises `InputFileError`."""
        if not isinstance(value, str) or not _NAME.match(value):
            raise self.error(
                key,
                f"{fields.shown(value)} cannot be a name",
                f"use at most {MAX_NAME} letters, digits and _.:/+@#- without spaces",
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; empty if the key is absent."""
        return tuple(self.checked_name(key, value) for value in self.items(key))

    def items(self, key: str) -> list[Any]:
        """A list of any values; empty if the key is absent."""
        value = self.data.get(key, [])
        # Callers of `cluster_from_dict` may pass tuples for lists.
        return fields.items(list(value) if isinstance(value, tuple) else value, self.path(key))

    def tables(self, key: str, known: tuple[str, ...]) -> list[FileTable]:
        """A list of tables (``[[key]]``); empty if the key is absent."""
        if isinstance(self.data.get(key), Mapping):
            raise self.error(key, "must be a list of tables", f"write [[{key}]], not [{key}]")
        return [
            FileTable.of(item, f"{key}[{index}]", known)
            for index, item in enumerate(self.items(key))
        ]

    def table(self, key: str, known: tuple[str, ...]) -> FileTable | None:
        """A table inside this one; None if the key is absent."""
        return FileTable.of(self.data[key], self.path(key), known) if key in self.data else None


def _first_clause(message: str) -> str:
    """First clause of a unit error; the hint of the key replaces the rest."""
    text = message.split(";")[0]
    return text if len(text) <= 200 else text[:197] + "…"
