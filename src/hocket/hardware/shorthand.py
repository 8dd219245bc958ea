"""Parse a Cluster from a file name, a preset, or shorthand such as ``2xdgx-h100+4xl4``.

``desktop.toml:big`` and ``dgx1-v100:gpu0,gpu3`` select devices of a cluster by name or type.
Devices given by type are placed on hosts and connected to them by PCIe. Machines and hosts are
connected by one network switch, each with the network of its own file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hocket.base.errors import InputFileError, UsageError, did_you_mean
from hocket.base.fields import shown
from hocket.base.jsonfile import read_json
from hocket.base.regular import is_file, read_regular
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link
from hocket.hardware.files import (
    DEFAULT_HOST,
    MAX_DEVICES,
    MAX_FILE_BYTES,
    Machine,
    MachineNetwork,
    machine_from_dict,
    read_machine,
)
from hocket.hardware.kinds import PRESETS, LinkFigures, preset_kinds
from hocket.hardware.tables import MAX_NAME
from hocket.hardware.topology import DevicePort, gpu_links, parse_topology

SUFFIXES = (".toml", ".xml", ".json", ".txt")
"""Endings of file names that describe a machine."""
# The generation of a GPU follows from its number of NVLinks: smallest number, kind, rate of a link.
_GENERATIONS = ((13, "h100-80g", 25e9), (7, "a100-40g", 25e9), (5, "v100-16g", 25e9),
                (1, "p100-16g", 20e9), (0, "v100-16g", 25e9))  # fmt: skip
_PCIE_BPS = 12e9


def is_machine_file(text: str) -> bool:
    """True if a name has the ending of a file that describes a machine."""
    return text.endswith(SUFFIXES)


def read_any_machine(path: str) -> Machine:
    """Machine of a hardware file (TOML or JSON), a topology dump (XML) or a matrix of GPUs
    (TXT)."""
    if path.endswith(".xml"):
        from hocket.hardware.nccl_xml import read_nccl_machine

        return read_nccl_machine(path)
    if path.endswith(".json"):
        data: Any = read_json(path, MAX_FILE_BYTES)
        return machine_from_dict(data, path, default_name=Path(path).stem)
    if path.endswith(".txt"):
        return read_matrix(path)
    return read_machine(path)


def read_matrix(path: str | Path) -> Machine:
    """Read the matrix of ``nvidia-smi topo -m``; the type of GPU follows from its number of
    NVLinks.
    """
    where = str(path)
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputFileError("is not text in UTF-8", where=where) from None
    # Text copied from a terminal often has spaces in place of the program's tabs.
    tabbed = text if "\t" in text else "\n".join("\t".join(x.split()) for x in text.splitlines())
    # The header of copied text often lacks the empty cell above the names of the rows.
    aligned = re.sub(r"^GPU0\t(?=GPU1)", r"\tGPU0\t", tabbed, count=1, flags=re.MULTILINE)
    gpus = sum(line.strip().startswith("GPU") for line in aligned.splitlines())
    # The legend below the matrix may name GPUs too, so the largest matrix that parses is used.
    counts = range(min(gpus, 256), 0, -1)
    topology = next((t for n in counts if (t := parse_topology(aligned, n))), None)
    if topology is None:
        raise InputFileError(
            "contains no matrix of GPUs",
            hint="save the output of nvidia-smi topo -m, header line included",
            where=where,
        )
    if (odd := topology.odd_cell()) is not None:
        src, dst = odd
        raise InputFileError(
            f"the entry for GPU{src} and GPU{dst} is {shown(topology.relation[src][dst])}",
            hint="NVLinks are written as NV and their number, such as NV2",
            where=where,
        )
    size = range(len(topology.relation))
    direct = max(topology.num_nvlinks(a, b) for a in size for b in size)
    total = max(sum(topology.num_nvlinks(a, b) for b in size) for a in size)
    # Behind a switch every pair shows all links of a GPU, so their sum is meaningless. 18 NVLinks
    # are the most that a GPU of the table has.
    per_gpu = direct if total > 18 else total
    kind, link_bps = next((k, bps) for least, k, bps in _GENERATIONS if per_gpu >= least)
    ports = [DevicePort(_PCIE_BPS, link_bps, max(per_gpu, 1)) for _ in size]
    data = {"devices": [{"kind": kind, "count": len(ports)}], "hosts": ["host"]}
    return machine_from_dict(
        {**data, **gpu_links(topology, ports)}, where, default_name=Path(path).stem
    )


MOST_PER_HOST = 16
"""Largest number of devices on one host; a larger number is spread over hosts of `PER_HOST`."""
PER_HOST = 8
DEFAULT_NETWORK = LinkFigures(bandwidth_bps=12.5e9, latency_s=5e-6)
"""Network of machines whose file states none: 100 Gbit/s per host."""
NETWORK = "network"

ALIASES = {"a100-sxm": "a100-80g-sxm", "h100": "h100-80g", "v100-sxm": "v100-16g-sxm"}
"""Short names of presets, with the usual meaning of ambiguous names."""
BOARDS = {
    "a100-40g-sxm": "dgx-a100-40g", "a100-80g-sxm": "dgx-a100-80g", "b200-sxm": "dgx-b200",
    "h100-sxm": "dgx-h100", "h200-sxm": "hgx-h200", "mi300x-oam": "mi300x-platform",
    "v100-16g-sxm": "dgx1-v100",
}  # fmt: skip
"""Machine of each GPU module type: N modules are the first N devices of the machine."""

_TERM = re.compile(r"(?:([0-9]{1,9})x)?(.+)\Z", re.DOTALL)


def cluster_from_text(text: str) -> Cluster:
    """Cluster of a hardware file, of a preset, or of shorthand.

    ``CLUSTER:NAME,NAME`` selects some of its devices by their names or types.
    """
    text = text.strip()
    cluster, colon, selection = text.partition(":")
    if colon and not is_file(text):
        return _select(cluster_from_text(cluster), selection, text)
    is_path = is_machine_file(text) and "+" not in text
    if is_file(text) or (is_path and not _TERM.match(text)[1]):  # type: ignore[index]
        return read_any_machine(text).cluster
    machines: list[Machine] = []
    kinds: list[str] = []
    for count, name in _terms(text):
        if name in preset_kinds():
            kinds += [name] * count
        elif name in BOARDS:
            machines += _boards(BOARDS[name], count)
        else:
            machines += [_machine(name)] * count
        devices = len(kinds) + sum(machine.cluster.num_devices for machine in machines)
        if devices > MAX_DEVICES:
            raise UsageError(f"{text!r} has more than {MAX_DEVICES} devices")
    # One host has up to 16 devices; a larger number is divided over hosts of 8.
    per_host = PER_HOST if len(kinds) > MOST_PER_HOST else MOST_PER_HOST
    for start in range(0, len(kinds), per_host):
        machines.append(_host_of(kinds[start : start + per_host]))
    if len(machines) == 1:
        return replace(machines[0].cluster, name=text)
    return _join(text, machines)


def _select(cluster: Cluster, selection: str, text: str) -> Cluster:
    """Select devices of a cluster by their names or types."""
    names: list[str] = []
    for part in (part.strip() for part in selection.split(",")):
        alike = [d.name for d in cluster.devices if part in (d.name, d.kind.name)]
        if not alike:
            known = {name for d in cluster.devices for name in (d.name, d.kind.name)}
            raise UsageError(
                f"{cluster.name} has no device {part[:100]!r}",
                hint=did_you_mean(part[:100], sorted(known)),
                where=text[:200],
            )
        names += alike
    return replace(cluster.only(names), name=text)


@cache
def machine_names() -> tuple[str, ...]:
    """Names of the preset machines."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml") if path.stem != "kinds"))


def joining_note(text: str) -> str | None:
    """Note that shorthand such as ``8xh100`` means PCIe links although a preset machine has faster
    ones.

    None if no such machine exists.
    """
    try:
        terms = [] if is_file(text.strip()) else list(_terms(text.strip()))
    except UsageError:  # `cluster_from_text` reports it
        return None
    notes = []
    for count, name in terms:
        faster = _faster_machines(name) if count > 1 else []
        boards = [f"{count}x{board}" for board in BOARDS if BOARDS[board] in faster]
        if faster:
            notes.append(
                f"{count}x{name} is {count} devices joined by PCIe; "
                f"{' or '.join(faster + boards)} joins them by links of their own"
            )
    return "; ".join(notes) or None


@cache
def _faster_machines(kind: str) -> list[str]:
    """Preset machines with only this device type whose devices communicate faster than by PCIe."""
    entry = preset_kinds().get(kind)
    if entry is None or entry.host_link is None:
        return []
    clusters = {name: _machine(name).cluster for name in machine_names()}
    return [
        name
        for name, cluster in clusters.items()
        if cluster.num_devices > 1
        and [own.name for own in cluster.kinds] == [kind]
        and cluster.network.inside_bps > entry.host_link.bandwidth_bps
    ]


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def _terms(text: str) -> Iterator[tuple[int, str]]:
    """Yield count and full name of each part of the shorthand."""
    for part in text.split("+"):
        match = _TERM.match(part.strip())
        if match is None:
            raise UsageError(
                f"cannot read {text[:200]!r} as hardware",
                hint="write it like '4xv100-16g', 'dgx1-v100', '1xh100+2xl4' or 'cluster.toml'",
            )
        count = 1 if match[1] is None else int(match[1])
        if not 1 <= count <= MAX_DEVICES:
            raise UsageError(f"count {count} of {part!r} is outside of 1 to {MAX_DEVICES}")
        yield count, match[2] if is_machine_file(match[2]) else _full_name(match[2], text)


def _full_name(name: str, text: str) -> str:
    """The preset with this name, or the only preset that begins with ``name-``."""
    names = (*preset_kinds(), *machine_names(), *BOARDS)
    lower = ALIASES.get(name.lower(), name.lower())
    if lower in names:
        return lower
    longer = sorted(
        known for known in names if known.startswith(f"{lower}-") and known not in BOARDS
    )
    if len(longer) == 1:
        return longer[0]
    where = "" if name == text else text[:200]
    if longer:
        raise UsageError(
            f"{name!r} can mean several kinds of hardware",
            hint=f"choose one of {', '.join(longer)}",
            where=where,
        )
    raise UsageError(
        f"unknown hardware {name[:100]!r}", hint=did_you_mean(lower[:100], names), where=where
    )


# ── machines ─────────────────────────────────────────────────────────────────────────────────────


def _machine(name: str) -> Machine:
    return read_any_machine(name if is_machine_file(name) else str(PRESETS / f"{name}.toml"))


def _boards(name: str, count: int) -> list[Machine]:
    """Machines for a number of modules: full machines, and the first devices of one more."""
    whole = _machine(name)
    devices = [device.name for device in whole.cluster.devices]
    full, left = divmod(count, len(devices))
    machines = [whole] * full
    if left:
        machines.append(replace(whole, cluster=whole.cluster.only(devices[:left])))
    return machines


def _host_of(kinds: list[str]) -> Machine:
    """One host with these devices, each on its own PCIe link."""
    return machine_from_dict({"devices": [{"kind": kind} for kind in kinds]}, "shorthand")


def _join(name: str, machines: list[Machine]) -> Cluster:
    """Connect machines by one network switch; ``gpu0`` of the first becomes ``host0.gpu0``."""
    if any(machine.cluster.uses_stated_times for machine in machines):
        raise UsageError(
            "a cluster whose transfer times come from a graph file cannot be joined with others",
            hint="use it alone, or remove uses_stated_times and state its links",
            where=name,
        )
    devices: list[Device] = []
    hosts: list[str] = []
    switches = [NETWORK]
    links: list[Link] = []
    kinds = _JoinedKinds()
    for index, machine in enumerate(machines):
        prefix = f"{DEFAULT_HOST}{index}"
        part = _renamed(machine.cluster, prefix, kinds)
        devices += part.devices
        hosts += part.hosts
        switches += part.switches
        links += part.links
        links += _network_links(machine, prefix)
    return Cluster(
        name=name,
        devices=tuple(devices),
        hosts=tuple(hosts),
        switches=tuple(switches),
        links=tuple(links),
        # The slowest host counts, because a plan must be correct on each of them.
        host_update_bps=min(machine.cluster.host_update_bps for machine in machines),
    )


class _JoinedKinds:
    """Device types of joined machines: equal types are merged, different types of one name
    renamed."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._named: dict[str, list[DeviceKind]] = {}
        """Types by the name that they have in their machine's file."""

    def add(self, kind: DeviceKind, prefix: str) -> DeviceKind:
        """The type with its name in the joined cluster."""
        others = self._named.setdefault(kind.name, [])
        for other in others:
            if replace(kind, name=other.name, source=other.source) == other:
                return other
        name, attempt = kind.name, 1
        while name in self._taken:
            end = f"@{prefix}" if attempt == 1 else f"@{prefix}#{attempt}"
            name, attempt = kind.name[: MAX_NAME - len(end)] + end, attempt + 1
        self._taken.add(name)
        others.append(replace(kind, name=name))
        return others[-1]


def _renamed(cluster: Cluster, prefix: str, joined: _JoinedKinds) -> Cluster:
    kinds = {kind.name: joined.add(kind, prefix) for kind in cluster.kinds}
    return replace(
        cluster,
        devices=tuple(
            replace(
                d,
                name=_below(prefix, d.name),
                host=_below(prefix, d.host),
                kind=kinds[d.kind.name],
            )
            for d in cluster.devices
        ),
        hosts=tuple(_below(prefix, host) for host in cluster.hosts),
        switches=tuple(_below(prefix, switch) for switch in cluster.switches),
        links=tuple(
            replace(x, name=f"{prefix}.{x.name}", ends=tuple(_below(prefix, end) for end in x.ends))
            for x in cluster.links
        ),
    )


def _below(prefix: str, place: str) -> str:
    return prefix if place == DEFAULT_HOST else f"{prefix}.{place}"


def _network_links(machine: Machine, prefix: str) -> Iterator[Link]:
    network = machine.network or MachineNetwork(machine.cluster.hosts, DEFAULT_NETWORK)
    for place in network.at:
        end = _below(prefix, place)
        yield Link(
            name=f"{end}-{NETWORK}",
            ends=(end, NETWORK),
            bandwidth_bps=network.link.bandwidth_bps,
            latency_s=network.link.latency_s,
        )
