"""Training programs that hocket knows by name, from ``softwares.toml``."""

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

DEFAULT_SOFTWARE = "megatron-core"


def _softwares() -> Mapping[str, Software]:
    tables = tomllib.loads(Path(__file__).with_name("softwares.toml").read_text())
    found: dict[str, Software] = {}
    for name, table in tables.items():
        own: dict[str, Any] = tables.get(table.pop("base", ""), {}) | table
        if isinstance(own.get("overheads"), dict):
            own["overheads"] = MemoryOverheads(**own["overheads"])
        found[name] = Software(name=name, **own)
    return MappingProxyType(found)


SOFTWARES = _softwares()


def usual_dtype(software: Software, cluster: Cluster) -> str:
    """The program's type of arithmetic, or one that all devices have where some lack it."""
    for dtype in (software.dtype, "float16", "bfloat16", "float32"):
        if all(dtype in kind.peak_flops for kind in cluster.kinds):
            return dtype
    return software.dtype


def find_software(name: str) -> Software:
    """The program of a name."""
    if name not in SOFTWARES:
        raise unknown_name("software", name, SOFTWARES)
    return SOFTWARES[name]
