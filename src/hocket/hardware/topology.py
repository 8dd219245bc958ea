"""Links between the GPUs of one machine, from the matrix that ``nvidia-smi topo -m`` prints.

Pairs joined by NVLink get direct links, or one switch where a GPU would need more NVLinks than it
has. Below that stands a PCIe tree: bridges (PIX, PXB), NUMA nodes (PHB, NODE, equal affinity), and
the host that joins them (SYS). O(GPUs²).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PCIE_LATENCY_S = 2.5e-6
NVLINK_LATENCY_S = 2e-6
BETWEEN_SOCKETS_BPS = 10e9
"""Bandwidth that NCCL assumes between sockets of Skylake CPUs: a cautious middle."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NVLINKS = re.compile(r"NV([0-9]{1,3})")
_BELOW_BRIDGE = frozenset({"PIX", "PXB"})
_BELOW_NODE = frozenset({"PIX", "PXB", "PHB", "NODE"})


@dataclass(frozen=True)
class Topology:
    """Connections between GPUs."""

    relation: tuple[tuple[str, ...], ...]
    """[gpu][gpu]: such as ``NV2``, ``PIX`` or ``SYS``."""
    affinity: tuple[str, ...]
    """CPUs near each GPU, as printed; empty where unknown."""

    def num_nvlinks(self, src: int, dst: int) -> int:
        """NVLinks between two GPUs."""
        match = _NVLINKS.fullmatch(self.relation[src][dst])
        return int(match[1]) if match and src != dst else 0

    def odd_cell(self) -> tuple[int, int] | None:
        """Two GPUs with an invalid number of NVLinks between them."""
        for src, row in enumerate(self.relation):
            for dst, cell in enumerate(row):
                if src != dst and cell.startswith("NV") and not _NVLINKS.fullmatch(cell):
                    return src, dst
        return None


@dataclass(frozen=True)
class DevicePort:
    """Ports of a GPU."""

    pcie_bps: float
    nvlink_bps: float
    """One NVLink, one direction."""
    max_nvlinks: int


def parse_topology(text: str, num_gpus: int) -> Topology | None:
    """The matrix in the text; None where it does not describe ``num_gpus`` GPUs."""
    lines = [_ESCAPE.sub("", line).split("\t") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines]
    head = next((line for line in cells if "GPU0" in line[1:]), None)
    if head is None:
        return None
    columns = [head.index(f"GPU{g}") for g in range(num_gpus) if f"GPU{g}" in head]
    near = head.index("CPU Affinity") if "CPU Affinity" in head else None
    rows = {line[0]: line for line in cells if re.fullmatch(r"GPU\d+", line[0])}
    if len(columns) < num_gpus or any(f"GPU{g}" not in rows for g in range(num_gpus)):
        return None
    ordered = [rows[f"GPU{g}"] for g in range(num_gpus)]
    if any(len(line) <= max(columns) for line in ordered):
        return None
    return Topology(
        relation=tuple(tuple(line[column] for column in columns) for line in ordered),
        affinity=tuple(
            line[near] if near is not None and len(line) > near and line[near] != "N/A" else ""
            for line in ordered
        ),
    )


def gpu_links(topology: Topology, ports: Sequence[DevicePort]) -> dict[str, Any]:
    """Switches and links of GPUs ``gpu0``, ``gpu1``, … as entries of a hardware file."""
    switches: list[str] = []
    links: list[dict[str, Any]] = []
    _add_nvlinks(topology, ports, switches, links)
    _add_pcie(topology, ports, switches, links)
    return {"switches": switches, "links": links}


def _add_nvlinks(
    topology: Topology,
    ports: Sequence[DevicePort],
    switches: list[str],
    links: list[dict[str, Any]],
) -> None:
    gpus = range(len(ports))
    counts = [[topology.num_nvlinks(src, dst) for dst in gpus] for src in gpus]
    switched = [gpu for gpu in gpus if sum(counts[gpu]) > ports[gpu].max_nvlinks]
    if switched:
        switches.append("nvswitch")
    for gpu in switched:
        bandwidth_bps = max(counts[gpu]) * ports[gpu].nvlink_bps
        links.append(_link(f"gpu{gpu}", "nvswitch", bandwidth_bps, NVLINK_LATENCY_S / 2))
    for src in gpus:
        for dst in range(src + 1, len(ports)):
            if counts[src][dst] and not (src in switched and dst in switched):
                bandwidth_bps = counts[src][dst] * ports[src].nvlink_bps
                links.append(_link(f"gpu{src}", f"gpu{dst}", bandwidth_bps, NVLINK_LATENCY_S))


def _add_pcie(
    topology: Topology,
    ports: Sequence[DevicePort],
    switches: list[str],
    links: list[dict[str, Any]],
) -> None:
    relation = topology.relation
    nodes = _groups(len(ports), lambda a, b: _share_node(topology, a, b))
    bridges = _groups(len(ports), lambda a, b: relation[a][b] in _BELOW_BRIDGE)
    parent = {gpu: "host" for gpu in range(len(ports))}
    if len(nodes) > 1:
        for index, members in enumerate(nodes):
            switches.append(f"numa{index}")
            links.append(_link(f"numa{index}", "host", BETWEEN_SOCKETS_BPS, 1e-6))
            parent.update(dict.fromkeys(members, f"numa{index}"))
    for index, members in enumerate([members for members in bridges if len(members) > 1]):
        switches.append(f"pcie{index}")
        fastest_bps = max(ports[gpu].pcie_bps for gpu in members)
        links.append(_link(f"pcie{index}", parent[members[0]], fastest_bps, 1e-6))
        parent.update(dict.fromkeys(members, f"pcie{index}"))
    for gpu, port in enumerate(ports):
        links.append(_link(f"gpu{gpu}", parent[gpu], port.pcie_bps, PCIE_LATENCY_S))


def _share_node(topology: Topology, a: int, b: int) -> bool:
    """True if two GPUs share a NUMA node; NVLink hides the PCIe between them."""
    relation, near = topology.relation[a][b], topology.affinity
    known_near = near[a] == near[b] and (near[a] != "" or relation != "SYS")
    return relation in _BELOW_NODE or known_near


def _groups(count: int, related: Callable[[int, int], bool]) -> list[list[int]]:
    """Members of each group of GPUs that the relation joins, directly or through others."""
    group = list(range(count))
    for src in range(count):
        for dst in range(src + 1, count):
            if related(src, dst) and group[src] != group[dst]:
                old, new = group[dst], group[src]
                group = [new if value == old else value for value in group]
    return [[gpu for gpu in range(count) if group[gpu] == g] for g in dict.fromkeys(group)]


def _link(src: str, dst: str, bandwidth_bps: float, latency_s: float) -> dict[str, Any]:
    return {"ends": [src, dst], "bandwidth": bandwidth_bps, "latency": latency_s}
