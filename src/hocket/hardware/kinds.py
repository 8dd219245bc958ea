"""Device types from files: the presets of hocket, and the types that hardware files define."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hocket.base import fields
from hocket.hardware.cluster import DeviceKind
from hocket.hardware.tables import BANDWIDTH, BYTES, FLOPS, SECONDS, FileTable

PRESETS = Path(__file__).parent / "presets"
"""Folder of the data files that are part of hocket."""

PEAK_TYPES = (
    "float32", "float64", "tf32", "bfloat16", "float16", "float8", "int8", "other",
)  # fmt: skip
"""Dtypes for which a device type may state a peak rate."""

_KEYS = (
    "memory", "headroom", "memory_bandwidth", "peak", "launch", "dispatch", "price_per_hour",
    "cpu", "source", "host_link",
)  # fmt: skip


@dataclass(frozen=True)
class LinkFigures:
    """Bandwidth and latency of a link that a file states inside another table."""

    bandwidth_bps: float
    latency_s: float


@dataclass(frozen=True)
class KindEntry:
    """A device type as a file states it."""

    kind: DeviceKind
    host_link: LinkFigures | None
    """Link to the host for devices that no link entry mentions."""


def kind_entry(name: str, data: Any) -> KindEntry:
    """The device type of one ``[kinds.NAME]`` table."""
    table = FileTable.of(data, fields.inside("kinds", name), _KEYS)
    table.checked_name("", name)
    table.require("peak", 'write peak = { float32 = "15.7TFLOP/s" }')
    peak = table.table("peak", PEAK_TYPES)
    assert peak is not None
    memory_bytes = round(table.quantity("memory", BYTES))
    headroom_bytes = round(table.quantity("headroom", BYTES, 0))
    if headroom_bytes >= memory_bytes:
        raise table.error("headroom", "is not less than the memory", "state a smaller one")
    kind = DeviceKind(
        name=name,
        memory_bytes=memory_bytes,
        headroom_bytes=headroom_bytes,
        peak_flops={key: float(peak.quantity(key, FLOPS)) for key in peak.data},
        memory_bandwidth_bps=float(table.quantity("memory_bandwidth", BANDWIDTH)),
        launch_s=float(table.quantity("launch", SECONDS, 0.0)),
        dispatch_s=float(table.quantity("dispatch", SECONDS, 0.0)),
        price_per_hour=table.number("price_per_hour", 1e6, 0.0),
        is_cpu=table.flag("cpu"),
        source=table.text("source", ""),
    )
    link = table.table("host_link", ("bandwidth", "latency"))
    return KindEntry(kind, None if link is None else link_figures(link))


def link_figures(table: FileTable) -> LinkFigures:
    """Bandwidth and latency of a table."""
    bandwidth_bps = float(table.quantity("bandwidth", BANDWIDTH))
    return LinkFigures(bandwidth_bps, float(table.quantity("latency", SECONDS, 0.0)))


@cache
def preset_tables() -> Mapping[str, Mapping[str, Any]]:
    """The tables of ``presets/kinds.toml`` by name; `hocket.hardware.detect` reads ``detect``."""
    path = PRESETS / "kinds.toml"
    return MappingProxyType(tomllib.loads(path.read_text(encoding="utf-8"))["kinds"])


@cache
def preset_kinds() -> Mapping[str, KindEntry]:
    """The device types of ``presets/kinds.toml`` by name."""
    plain = {
        name: {key: value for key, value in table.items() if key != "detect"}
        for name, table in preset_tables().items()
    }
    return MappingProxyType({name: kind_entry(name, plain[name]) for name in plain})
