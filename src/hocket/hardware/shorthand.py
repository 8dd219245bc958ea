"""Parse a Cluster from a file name, a preset, or shorthand such as ``2xdgx-h100+4xl4``.

Some of its devices are chosen by names or kinds: ``desktop.toml:big``, ``dgx1-v100:gpu0,gpu3``.

Kinds are put on hosts and joined by PCIe through them; machines, and the hosts that the kinds
need, are joined by one network switch, each with the network figures of its own file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from hocket.base.errors import InputFileError, UsageError, did_you_mean
from hocket.base.fields import shown
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
from hocket.hardware.kinds import PRESETS, HostJoint, preset_kinds
from hocket.hardware.tables import MAX_NAME
from hocket.hardware.topology import DevicePort, gpu_links, parse_topology

# Files of other programs that describe a machine: which reader reads which.

SUFFIXES = (".toml", ".xml", ".json", ".txt")
"""Endings of file names that describe a machine."""
# From how many NVLinks per GPU on which generation it is: its kind, and one link's rate.
_GENERATIONS = ((13, "h100-80g", 25e9), (7, "a100-40g", 25e9), (5, "v100-16g", 25e9),
                (1, "p100-16g", 20e9), (0, "v100-16g", 25e9))  # fmt: skip
_PCIE_BPS = 12e9


def is_machine_file(text: str) -> bool:
    """True if a name is that of a file, by its ending."""
    return text.partition("#")[0].endswith(SUFFIXES)


def read_any_machine(text: str) -> Machine:
    """The machine of a TOML file, a topology dump, a matrix or JSON (``file.json#name``)."""
    path, _, name = text.partition("#")
    if path.endswith(".xml"):
        from hocket.hardware.nccl_xml import read_nccl_machine

        return read_nccl_machine(path)
    if path.endswith(".json"):
        from hocket.hardware.foreign_json import read_json_machine

        return read_json_machine(path, name)
    if path.endswith(".txt"):
        return read_matrix(path)
    return read_machine(text)


def read_matrix(path: str | Path) -> Machine:
    """Read the matrix of ``nvidia-smi topo -m``; the generation follows from the links."""
    where = str(path)
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputFileError("is not text in UTF-8", where=where) from None
    # Copied text often has spaces where the program prints tabs.
    tabbed = text if "\t" in text else "\n".join("\t".join(x.split()) for x in text.splitlines())
    gpus = sum(line.strip().startswith("GPU") for line in tabbed.splitlines())
    counts = range(min(gpus, 256), 0, -1)
    topology = next((t for n in counts if (t := parse_topology(_aligned(tabbed), n))), None)
    if topology is None:
        raise InputFileError(
            "holds no matrix of GPUs",
            hint="save what nvidia-smi topo -m prints, header line included",
            where=where,
        )
    if (odd := topology.odd_cell()) is not None:
        src, dst = odd
        raise InputFileError(
            f"GPU{src} and GPU{dst} are joined by {shown(topology.relation[src][dst])}",
            hint="NVLinks are written as NV and their number, such as NV2",
            where=where,
        )
    size = range(len(topology.relation))
    direct = max(topology.num_nvlinks(a, b) for a in size for b in size)
    total = max(sum(topology.num_nvlinks(a, b) for b in size) for a in size)
    # With a switch every pair shows all links of a GPU, so their sum says nothing.
    per_gpu = direct if total > 18 else total
    kind, link_bps = next((k, bps) for least, k, bps in _GENERATIONS if per_gpu >= least)
    ports = [DevicePort(_PCIE_BPS, link_bps, max(per_gpu, 1)) for _ in size]
    data = {"devices": [{"kind": kind, "count": len(ports)}], "hosts": ["host"]}
    return machine_from_dict(
        {**data, **gpu_links(topology, ports)}, where, default_name=Path(path).stem
    )


def _aligned(text: str) -> str:
    """The matrix with its header above its columns: a header that begins with GPU0 lacks a cell."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.lstrip().startswith("GPU0") and "GPU1" in line and not line.startswith("\t"):
            following = next((x for x in lines[index + 1 :] if x.strip().startswith("GPU0")), "")
            if following and line.split("\t")[0].strip() == "GPU0":
                lines[index] = "\t" + line
                break
    return "\n".join(lines)


MOST_PER_HOST = 16
"""Kinds fill one host up to this many devices; more are spread over hosts of `PER_HOST`."""
PER_HOST = 8
DEFAULT_NETWORK = HostJoint(bandwidth_bps=12.5e9, latency_s=5e-6)
"""100 Gbit/s per host, for machines whose file states no network."""
NETWORK = "network"

ALIASES = {"a100-sxm": "a100-80g-sxm", "h100": "h100-80g", "v100-sxm": "v100-16g-sxm"}
"""Names that mean one of several presets, as most people use them."""
BOARDS = {
    "a100-40g-sxm": "dgx-a100-40g", "a100-80g-sxm": "dgx-a100-80g", "b200-sxm": "dgx-b200",
    "h100-sxm": "dgx-h100", "h200-sxm": "hgx-h200", "mi300x-oam": "mi300x-platform",
    "v100-16g-sxm": "dgx1-v100",
}  # fmt: skip
"""Module presets, mapped to the machine whose first modules they are."""

_TERM = re.compile(r"(?:([0-9]{1,9})x)?(.+)\Z", re.DOTALL)


def cluster_from_text(text: str) -> Cluster:
    """The cluster of a file (of ours or of other programs), of a preset, or of shorthand.

    ``WHAT:NAME,NAME`` takes only some devices of it, by their names or kinds.
    """
    text = text.strip()
    whole, colon, chosen = text.partition(":")
    if colon and not is_file(text):
        return _chosen(cluster_from_text(whole), chosen, text)
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
    per_host = PER_HOST if len(kinds) > MOST_PER_HOST else MOST_PER_HOST
    for start in range(0, len(kinds), per_host):
        machines.append(_host_of(kinds[start : start + per_host]))
    if len(machines) == 1:
        return replace(machines[0].cluster, name=text)
    return _join(text, machines)


def _chosen(cluster: Cluster, chosen: str, text: str) -> Cluster:
    """Some devices of a cluster, by their names or kinds."""
    names: list[str] = []
    for part in (part.strip() for part in chosen.split(",")):
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
    """Note on links of shorthand such as ``8xh100``, where machines have faster ones.

    Kinds are joined by PCIe; whoever has the machine that is usual for a kind should name it.
    """
    try:
        terms = [] if is_file(text.strip()) else list(_terms(text.strip()))
    except UsageError:  # said in full where the cluster is made
        return None
    notes = []
    for count, name in terms:
        faster = _faster_machines(name) if count > 1 else ()
        if faster:
            notes.append(
                f"{count}x{name} is {count} devices joined by PCIe; "
                f"{' or '.join(_faster_names(count, faster))} joins them by links of their own"
            )
    return "; ".join(notes) or None


def _faster_names(count: int, machines: Sequence[str]) -> list[str]:
    boards = [board for board, machine in BOARDS.items() if machine in machines]
    return [*machines, *(f"{count}x{board}" for board in boards)]


@cache
def _faster_machines(kind: str) -> tuple[str, ...]:
    """Machines of this kind alone whose devices reach each other faster than through PCIe."""
    entry = preset_kinds().get(kind)
    if entry is None or entry.host_link is None:
        return ()
    found = []
    for name in machine_names():
        cluster = _machine(name).cluster
        alike = cluster.num_devices > 1 and {d.kind.name for d in cluster.devices} == {kind}
        if alike and cluster.network.inside_bps > entry.host_link.bandwidth_bps:
            found.append(name)
    return tuple(found)


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def _terms(text: str) -> Iterator[tuple[int, str]]:
    """Count and full name of each part of the shorthand."""
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
    """The preset called ``name``, or the only one that begins with ``name-``."""
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
    """A number of modules: full machines, and the first devices of one more."""
    whole = _machine(name)
    devices = [device.name for device in whole.cluster.devices]
    full, left = divmod(count, len(devices))
    machines = [whole] * full
    if left:
        machines.append(replace(whole, cluster=whole.cluster.only(devices[:left])))
    return machines


def _host_of(kinds: list[str]) -> Machine:
    """One host with these kinds, each device on its own PCIe link."""
    return machine_from_dict({"devices": [{"kind": kind} for kind in kinds]}, "shorthand")


def _join(name: str, machines: list[Machine]) -> Cluster:
    """Join machines by one network switch; ``gpu0`` of the first becomes ``host0.gpu0``."""
    if any(machine.cluster.uses_stated_times for machine in machines):
        raise UsageError(
            "hardware whose transfer times are in a graph's file cannot be joined",
            hint="use it alone, or remove uses_stated_times and state what its links do",
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
        # A plan must hold on each of them.
        host_update_bps=min(machine.cluster.host_update_bps for machine in machines),
    )


class _JoinedKinds:
    """Kinds of joined machines: equal ones are one, others of a name taken get a new name."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._named: dict[str, list[DeviceKind]] = {}
        """Kinds by the name that their machine gave them."""

    def add(self, kind: DeviceKind, prefix: str) -> DeviceKind:
        """The kind as it is called in the joined cluster."""
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
