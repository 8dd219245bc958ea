"""Predefined training programs, read from ``softwares.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hocket.base.errors import unknown_name
from hocket.cost.parallel.overheads import MemoryOverheads
from hocket.cost.parallel.software import Software
from hocket.hardware.cluster import Cluster

DEFAULT_SOFTWARE = "hocket"
"""This project's own runtime, as `hocket run` and `hocket launch` execute it."""


PROGRAM_TABLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    tomllib.loads(Path(__file__).with_name("softwares.toml").read_text())
)
"""Tables of ``softwares.toml`` by program name."""


def _software(name: str) -> Software:
    table = PROGRAM_TABLES[name]
    own = {**PROGRAM_TABLES.get(table.get("base", ""), {}), **table}
    fields = {key: value for key, value in own.items() if key not in ("base", "runs")}
    if "overheads" in fields:
        fields["overheads"] = MemoryOverheads(**fields["overheads"])
    return Software(name=name, **fields)


SOFTWARES: Mapping[str, Software] = MappingProxyType(
    {name: _software(name) for name in PROGRAM_TABLES}
)


def usual_dtype(software: Software, cluster: Cluster) -> str:
    """The program's dtype, or the first other dtype that all devices support."""
    for dtype in (software.dtype, "float16", "bfloat16", "float32"):
        if all(dtype in kind.peak_flops for kind in cluster.kinds):
            return dtype
    return software.dtype


def find_software(name: str) -> Software:
    """Return the program with this name; raises `UsageError` if there is none."""
    if name not in SOFTWARES:
        raise unknown_name("software", name, SOFTWARES)
    return SOFTWARES[name]
