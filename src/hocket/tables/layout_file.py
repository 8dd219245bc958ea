"""The tables of a program as a TOML file.

shards = 2
clients = 4

[[table]]
name = "items"
rows = 10000
width = 32
staleness = 2         # or inf
mode = "managed"
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hocket.base.checked import checked
from hocket.base.fields import located
from hocket.base.regular import read_regular
from hocket.base.toml import parse_toml
from hocket.tables.spec import Layout, TableSpec

_MAX_BYTES = 10**6


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)

    name: str = Field(min_length=1, max_length=200)
    num_rows: int = Field(alias="rows")
    width: int
    staleness: float = 1
    mode: str = "essp"
    order: str = "magnitude"
    is_adaptive: bool = Field(False, alias="adaptive")
    rate: float = 0.1
    curvature: float = 1.0


class _Layout(BaseModel):
    model_config = ConfigDict(extra="forbid")

    shards: int = Field(1, ge=1, le=4096)
    clients: int = Field(1, ge=1, le=65535)
    table: list[_Table] = Field(min_length=1)


def layout_of(data: object, where: str) -> Layout:
    """A layout from the data of a file."""
    found = checked(_Layout, data, where)
    tables = tuple(TableSpec(**each.model_dump()) for each in found.table)
    return Layout(tables, found.shards, found.clients)


def read_layout(path: str | Path) -> Layout:
    """The layout in a TOML file."""
    with located(str(path)):
        data = parse_toml(read_regular(path, _MAX_BYTES))
    return layout_of(data, str(path))
