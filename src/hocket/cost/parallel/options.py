"""Parse settings of a training program from text such as ``async-tp,float8=rowwise``.

Each option changes the fields of `Software` that it stands for and nothing else. Predictions are
for a program with its options applied.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hocket.base.errors import UsageError, unknown_name
from hocket.base.units import whole_number
from hocket.cost.parallel.software import Software

MAX_SHARDS = 1_000_000


class ProgramOption(NamedTuple):
    """An option of a training program: its meaning, and the fields of `Software` that it sets."""

    meaning: str
    fields: Mapping[str, Any] = MappingProxyType({})
    by_value: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Fields by value, for an option that is written with an equals sign."""
    values: str = ""
    """Description of the values; empty for an option without."""


OPTIONS: Mapping[str, ProgramOption] = MappingProxyType(
    {
        name: ProgramOption(**table)
        for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    }
)
"""Options by name, from ``options.toml``."""


def with_options(software: Software, texts: Sequence[str]) -> Software:
    """Return the program with the options of ``texts`` applied in order."""
    for text in texts:
        for part in text.split(","):
            if part.strip():
                software = replace(software, **_fields(part.strip()))
    return software


def _fields(text: str) -> Mapping[str, Any]:
    """Fields of `Software` that one option sets."""
    name, equals, value = (word.strip() for word in text.partition("="))
    if name not in OPTIONS:
        raise unknown_name("option of a program", name[:60], OPTIONS)
    option = OPTIONS[name]
    # An option with values needs one, and an option without takes none.
    if bool(equals) != bool(option.values):
        expected = f"{name}={option.values}" if option.values else name
        raise UsageError(f"cannot read {text[:60]!r}", hint=f"write {expected}")
    if option.by_value and value not in option.by_value:
        raise unknown_name(name, value[:60], option.by_value)
    if name != "hsdp":
        return option.by_value.get(value, option.fields)
    num_ranks = whole_number(value, MAX_SHARDS)
    if not num_ranks:
        raise UsageError(
            f"hsdp is {value[:60]!r}", hint="expected the replicas that shard state: hsdp=8"
        )
    return {"shard_ranks": num_ranks}
