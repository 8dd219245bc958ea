"""Write a Cluster in the schema of the hardware files, as a mapping (JSON) or as TOML.

Quantities are texts with units that read back to exactly the same number. Devices and links that
differ only in their number share an entry. Reading the result gives the same cluster.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.hardware.cluster import UNSTATED_HOST_UPDATE_BPS, Cluster, Device, DeviceKind, Link
from hocket.hardware.links import LinkNames
from hocket.hardware.tables import BANDWIDTH, BYTES, FLOPS, SECONDS, Quantity

_BINARY = ("TiB", "GiB", "MiB", "KiB", "B")
_DECIMAL = ("T", "G", "M", "k", "")
_PER_LINE = 4


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain data in the schema of the TOML files."""
    data: dict[str, Any] = {"name": cluster.name}
    if cluster.meta:
        data["meta"] = dict(cluster.meta)
    if cluster.uses_stated_times:
        data["uses_stated_times"] = True
    if cluster.host_update_bps != UNSTATED_HOST_UPDATE_BPS:
        data["host_update"] = _rate(cluster.host_update_bps, "B/s", BANDWIDTH)
    data["hosts"] = list(cluster.hosts)
    if cluster.switches:
        data["switches"] = list(cluster.switches)
    data["kinds"] = {kind.name: _kind(kind) for kind in cluster.kinds}
    data["devices"] = list(_devices(cluster))
    if cluster.links:
        data["links"] = list(_links(cluster))
    return data


def cluster_to_toml(cluster: Cluster) -> str:
    """The cluster as the text of a TOML file."""
    data = cluster_to_dict(cluster)
    plain = ("name", "uses_stated_times", "host_update", "hosts", "switches")
    lines = [f"{key} = {_value(data[key])}" for key in plain if key in data]
    lines += [f"meta.{_key(key)} = {_value(value)}" for key, value in data.get("meta", {}).items()]
    for name, kind in data["kinds"].items():
        lines += ["", f"[kinds.{_key(name)}]", *_assignments(kind)]
    for section in ("devices", "links"):
        for entry in data.get(section, ()):
            lines += ["", f"[[{section}]]", *_assignments(entry)]
    return "\n".join(lines) + "\n"


# ── entries ──────────────────────────────────────────────────────────────────────────────────────


def _kind(kind: DeviceKind) -> dict[str, Any]:
    data: dict[str, Any] = {
        "memory": _bytes(kind.memory_bytes),
        **({"headroom": _bytes(kind.headroom_bytes)} if kind.headroom_bytes else {}),
        "memory_bandwidth": _rate(kind.memory_bandwidth_bps, "B/s", BANDWIDTH),
        "peak": {
            dtype: _rate(kind.peak_flops[dtype], "FLOP/s", FLOPS)
            for dtype in sorted(kind.peak_flops)
        },
        "launch": _seconds(kind.launch_s),
        **({"dispatch": _seconds(kind.dispatch_s)} if kind.dispatch_s else {}),
        "price_per_hour": float(kind.price_per_hour),
    }
    if kind.is_cpu:
        data["cpu"] = True
    if kind.source:
        data["source"] = kind.source
    return data


def _devices(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """One entry per run of devices that differ only in the number at the end of their names."""
    numbered: Counter[str] = Counter()
    entry: dict[str, Any] = {}
    for device in cluster.devices:
        prefix = device.name.rstrip("0123456789")
        is_next = bool(prefix) and device.name == f"{prefix}{numbered[prefix]}"
        fresh = _device(device, prefix if is_next else device.name)
        if is_next:
            numbered[prefix] += 1
            # Reading numbers the names from 0, so only consecutive names can share an entry.
            if entry and "count" in entry and {**entry, "count": 1} == {**fresh, "count": 1}:
                entry["count"] += 1
                continue
            fresh["count"] = 1
        if entry:
            yield entry
        entry = fresh
    if entry:
        yield entry


def _device(device: Device, name: str) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": device.kind.name, "name": name, "host": device.host}
    if device.memory_bytes != device.kind.memory_bytes:
        data["memory"] = _bytes(device.memory_bytes)
    return data


def _links(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """One entry per run of two-ended links with equal figures and default names."""
    names = LinkNames()
    run: dict[str, Any] = {}
    for link in cluster.links:
        figures = _figures(link)
        own_name = names.next(link.ends)
        if len(link.ends) == 2 and link.name == own_name:
            if run and {**run, "between": []} == {**figures, "between": []}:
                run["between"].append(list(link.ends))
                continue
            fresh = {"between": [list(link.ends)], **figures}
        else:
            fresh = {"name": link.name, "ends": list(link.ends), **figures}
        if run:
            yield run
        run = fresh
    if run:
        yield run


def _figures(link: Link) -> dict[str, Any]:
    data: dict[str, Any] = {
        "bandwidth": _rate(link.bandwidth_bps, "B/s", BANDWIDTH),
        "latency": _seconds(link.latency_s),
    }
    if link.duplex != "full":
        data["duplex"] = link.duplex
    return data


# ── quantities ───────────────────────────────────────────────────────────────────────────────────


def _exact(value: float, scaled: Iterator[tuple[float, str]], quantity: Quantity) -> str | None:
    """First short text that reads back as exactly ``value``; None if there is none."""
    for number, unit in scaled:
        if number >= 1 or number == 0:
            text = f"{number:.9g}{unit}"
            if quantity.parse(text) == value:
                return text
    return None


def _bytes(size_bytes: int) -> str:
    scales = ((size_bytes / 1024 ** (4 - i), unit) for i, unit in enumerate(_BINARY))
    return _exact(size_bytes, scales, BYTES) or f"{int(size_bytes)}B"


def _rate(rate: float, unit: str, quantity: Quantity) -> str:
    scales = ((rate / 1000.0 ** (4 - i), f"{prefix}{unit}") for i, prefix in enumerate(_DECIMAL))
    return _exact(rate, scales, quantity) or f"{float(rate)!r}{unit}"


def _seconds(duration_s: float) -> str:
    scales = ((duration_s * scale, unit) for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")))
    return _exact(duration_s, scales, SECONDS) or f"{float(duration_s)!r}s"


# ── TOML ─────────────────────────────────────────────────────────────────────────────────────────


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "")
    return name if bare.isascii() and bare.isalnum() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes the same characters as TOML except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(_assignments(value))
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        items = [_value(item) for item in value]
        if len(items) <= _PER_LINE:
            return f"[{', '.join(items)}]"
        rows = [items[i : i + _PER_LINE] for i in range(0, len(items), _PER_LINE)]
        return "[\n" + "".join(f"    {', '.join(row)},\n" for row in rows) + "]"
    return repr(value)
