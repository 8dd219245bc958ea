"""Read a Cluster from TOML files, or from the same schema as JSON.

`docs/reference/hardware.md` describes the schema. Unknown keys are errors. A file may state the
network of its machine, which is used only if several machines are joined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import located
from hocket.base.regular import read_regular
from hocket.base.toml import parse_toml
from hocket.hardware.cluster import UNSTATED_HOST_UPDATE_BPS, Cluster, Device
from hocket.hardware.kinds import KindEntry, LinkFigures, kind_entry, link_figures, preset_kinds
from hocket.hardware.links import read_links
from hocket.hardware.tables import BANDWIDTH, BYTES, FileTable
from hocket.hardware.write import cluster_to_dict, cluster_to_toml

__all__ = [
    "Machine",
    "MachineNetwork",
    "cluster_from_dict",
    "cluster_to_dict",
    "cluster_to_toml",
    "machine_from_dict",
    "read_cluster",
    "read_machine",
]

MAX_FILE_BYTES = 10_000_000
MAX_DEVICES = 100_000
DEFAULT_HOST = "host"

_TOP = (
    "name", "meta", "uses_stated_times", "host_update", "hosts", "switches", "kinds", "network",
    "devices", "links",
)  # fmt: skip
_DEVICE = ("kind", "name", "count", "host", "memory")


@dataclass(frozen=True)
class MachineNetwork:
    """Links of a machine to other machines: one link from each place in ``at`` to the network."""

    at: tuple[str, ...]
    link: LinkFigures


@dataclass(frozen=True)
class Machine:
    """A cluster as its file states it, with its network if the file states one."""

    cluster: Cluster
    network: MachineNetwork | None


def read_cluster(path: str | Path) -> Cluster:
    """Cluster of a TOML file; raises `InputFileError` that names file, key and remedy."""
    return read_machine(path).cluster


def read_machine(path: str | Path) -> Machine:
    """Cluster of a TOML file and the network of the machine."""
    where = str(path)
    if not os.path.exists(path):
        raise InputFileError(
            "no such file",
            where=where,
            hint="give the path of a TOML file, or a preset name such as 'dgx1-v100'",
        )
    content = read_regular(path, MAX_FILE_BYTES)
    with located(where):
        hint = 'texts and quantities need quotes: bandwidth = "25GB/s"'
        data = parse_toml(content, hint)
    return machine_from_dict(data, where, default_name=Path(path).stem)


def cluster_from_dict(data: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """Cluster of a mapping from `cluster_to_dict`; ``where`` names its source in errors."""
    return machine_from_dict(data, where).cluster


def machine_from_dict(
    data: Mapping[str, Any], where: str, default_name: str = "cluster"
) -> Machine:
    """Cluster and network of a mapping in the schema of the TOML files."""
    with located(where):
        return _machine(FileTable.of(data, "", _TOP), default_name)


def _machine(top: FileTable, default_name: str) -> Machine:
    kinds = {**preset_kinds(), **_own_kinds(top)}
    entries = top.tables("devices", _DEVICE)
    devices = tuple(_devices(entries, kinds, top))
    hosts = tuple(dict.fromkeys((*top.names("hosts"), *(device.host for device in devices))))
    switches = top.names("switches")
    _refuse_repeated((*(d.name for d in devices), *hosts, *switches), top)
    cluster = Cluster(
        name=top.text("name", default_name) or default_name,
        devices=devices,
        hosts=hosts,
        switches=switches,
        links=read_links(top, devices, (*hosts, *switches), kinds),
        host_update_bps=float(top.quantity("host_update", BANDWIDTH, UNSTATED_HOST_UPDATE_BPS)),
        uses_stated_times=top.flag("uses_stated_times"),
        meta=_meta(top),
    )
    return Machine(cluster, _network(top, cluster))


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def _own_kinds(top: FileTable) -> dict[str, KindEntry]:
    kinds = top.data.get("kinds", {})
    if not isinstance(kinds, Mapping):
        raise top.error("kinds", "must be tables", "write [kinds.my-gpu] and its values below")
    return {name: kind_entry(name, kinds[name]) for name in kinds}


def _devices(
    entries: list[FileTable], kinds: Mapping[str, KindEntry], top: FileTable
) -> Iterator[Device]:
    if not entries:
        raise top.error("devices", "the list is empty", "add [[devices]] with kind and count")
    numbered: Counter[str] = Counter()
    left = MAX_DEVICES
    for table in entries:
        kind_name = table.name("kind")
        if kind_name not in kinds:
            raise table.error(
                "kind",
                f"unknown kind {kind_name!r}",
                f"{did_you_mean(kind_name, kinds)} or describe it in [kinds.{kind_name}]",
            )
        kind = kinds[kind_name].kind
        count = table.integer("count", MAX_DEVICES)
        left -= count or 1
        if left < 0:
            raise table.error("count", f"makes more than {MAX_DEVICES} devices")
        memory_bytes = round(table.quantity("memory", BYTES, kind.memory_bytes))
        if memory_bytes > kind.memory_bytes:
            raise table.error("memory", f"is more than the kind {kind_name!r} has")
        prefix = table.name("name", "cpu" if kind.is_cpu else "gpu")
        host = table.name("host", DEFAULT_HOST)
        for _ in range(count or 1):
            name = prefix
            if count is not None or "name" not in table.data:
                name = f"{prefix}{numbered[prefix]}"
                numbered[prefix] += 1
            yield Device(name=name, kind=kind, host=host, memory_bytes=memory_bytes)


def _refuse_repeated(places: Sequence[str], top: FileTable) -> None:
    if len(set(places)) == len(places):
        return
    name = next(name for name, count in Counter(places).items() if count > 1)
    raise top.error(
        "", f"two places have the name {name!r}", "devices, hosts and switches need distinct names"
    )


# ── notes and network ────────────────────────────────────────────────────────────────────────────


def _meta(top: FileTable) -> dict[str, str | int | float | bool]:
    """Free notes: any keys, with text, numbers or booleans as values."""
    meta = top.data.get("meta", {})
    if not isinstance(meta, Mapping):
        raise top.error("meta", "must be a table", 'write meta.source = "…"')
    notes = FileTable(meta, "meta")
    for key, value in meta.items():
        notes.checked_name("", key)
        if isinstance(value, str):
            notes.text(key, "")
        elif not isinstance(value, (int, float, bool)) or abs(value) > 1e300 or value != value:
            raise notes.error(key, "must be text, a number, true or false")
    return dict(meta)


def _network(top: FileTable, cluster: Cluster) -> MachineNetwork | None:
    table = top.table("network", ("at", "bandwidth", "latency"))
    if table is None:
        return None
    at = table.names("at") or cluster.hosts
    places = (*cluster.device_names, *cluster.hosts, *cluster.switches)
    for name in at:
        if name not in places:
            hint = did_you_mean(name, (*cluster.hosts, *cluster.switches))
            raise table.error("at", f"no device, host or switch is called {name!r}", hint)
    return MachineNetwork(at, link_figures(table))
