"""Links between the GPUs of one machine, from the matrix that ``nvidia-smi topo -m`` prints.

GPUs connected by NVLink get direct links, or one switch if a GPU would need more NVLinks than it
has. All GPUs are also leaves of a PCIe tree of bridges (PIX, PXB), NUMA nodes (PHB, NODE, equal
affinity) and the host (SYS). O(GPUs²).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

PCIE_LATENCY_S = 2.5e-6
NVLINK_LATENCY_S = 2e-6
BETWEEN_SOCKETS_BPS = 10e9
"""Bandwidth that NCCL assumes between Skylake CPUs, a conservative value for other CPUs."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NVLINKS = re.compile(r"NV([0-9]{1,3})")
_BELOW_BRIDGE = frozenset({"PIX", "PXB"})
_BELOW_NODE = frozenset({"PIX", "PXB", "PHB", "NODE"})


@dataclass(frozen=True)
class Topology:
    """Connections between the GPUs of a machine."""

    relation: tuple[tuple[str, ...], ...]
    """[gpu][gpu]: connection such as ``NV2``, ``PIX`` or ``SYS``."""
    affinity: tuple[str, ...]
    """CPUs near each GPU as printed; empty if unknown."""

    def num_nvlinks(self, src: int, dst: int) -> int:
        """Number of NVLinks between two GPUs."""
        match = _NVLINKS.fullmatch(self.relation[src][dst])
        return int(match[1]) if match and src != dst else 0

    def odd_cell(self) -> tuple[int, int] | None:
        """A pair of GPUs with an invalid number of NVLinks between them; None if all are valid."""
        cells = (
            (src, dst, cell)
            for src, row in enumerate(self.relation)
            for dst, cell in enumerate(row)
            if src != dst
        )
        odd = (
            (src, dst)
            for src, dst, cell in cells
            if cell.startswith("NV") and not _NVLINKS.fullmatch(cell)
        )
        return next(odd, None)


@dataclass(frozen=True)
class DevicePort:
    """Bandwidths of a GPU's ports."""

    pcie_bps: float
    nvlink_bps: float
    """Bytes per second of one NVLink in one direction."""
    max_nvlinks: int


def parse_topology(text: str, num_gpus: int) -> Topology | None:
    """Parse the matrix; None if the text does not describe ``num_gpus`` GPUs."""
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
    links = [*_nvlinks(topology, ports), *_pcie_links(topology, ports)]
    ends = dict.fromkeys(end for link in links for end in link["ends"])
    gpus = {f"gpu{gpu}" for gpu in range(len(ports))}
    return {"switches": [end for end in ends if end not in {"host", *gpus}], "links": links}


def _nvlinks(topology: Topology, ports: Sequence[DevicePort]) -> Iterator[dict[str, Any]]:
    gpus = range(len(ports))
    counts = [[topology.num_nvlinks(src, dst) for dst in gpus] for src in gpus]
    switched = [gpu for gpu in gpus if sum(counts[gpu]) > ports[gpu].max_nvlinks]
    for gpu in switched:
        bandwidth_bps = max(counts[gpu]) * ports[gpu].nvlink_bps
        # Half of the latency per link: a path between two GPUs crosses two links of the switch.
        yield _link(f"gpu{gpu}", "nvswitch", bandwidth_bps, NVLINK_LATENCY_S / 2)
    for src, dst in combinations(gpus, 2):
        if counts[src][dst] and not (src in switched and dst in switched):
            bandwidth_bps = counts[src][dst] * ports[src].nvlink_bps
            yield _link(f"gpu{src}", f"gpu{dst}", bandwidth_bps, NVLINK_LATENCY_S)


def _pcie_links(topology: Topology, ports: Sequence[DevicePort]) -> Iterator[dict[str, Any]]:
    relation = topology.relation
    nodes = _groups(len(ports), lambda a, b: _share_node(topology, a, b))
    bridges = _groups(len(ports), lambda a, b: relation[a][b] in _BELOW_BRIDGE)
    parent = {gpu: "host" for gpu in range(len(ports))}
    for index, members in enumerate(nodes if len(nodes) > 1 else ()):
        yield _link(f"numa{index}", "host", BETWEEN_SOCKETS_BPS, 1e-6)
        parent.update(dict.fromkeys(members, f"numa{index}"))
    for index, members in enumerate([members for members in bridges if len(members) > 1]):
        fastest_bps = max(ports[gpu].pcie_bps for gpu in members)
        yield _link(f"pcie{index}", parent[members[0]], fastest_bps, 1e-6)
        parent.update(dict.fromkeys(members, f"pcie{index}"))
    for gpu, port in enumerate(ports):
        yield _link(f"gpu{gpu}", parent[gpu], port.pcie_bps, PCIE_LATENCY_S)


def _share_node(topology: Topology, a: int, b: int) -> bool:
    """True if two GPUs share a NUMA node."""
    relation, near = topology.relation[a][b], topology.affinity
    # For GPUs with NVLink the matrix shows NVLinks in place of the PCIe relation, so the CPU
    # affinity decides.
    are_near = near[a] == near[b] and (near[a] != "" or relation != "SYS")
    return relation in _BELOW_NODE or are_near


def _groups(count: int, related: Callable[[int, int], bool]) -> list[list[int]]:
    """Groups of GPUs that the relation connects, directly or through other GPUs."""
    group = list(range(count))
    for src, dst in combinations(range(count), 2):
        if related(src, dst):
            old, new = group[dst], group[src]
            group = [new if value == old else value for value in group]
    return [[gpu for gpu in range(count) if group[gpu] == g] for g in dict.fromkeys(group)]


def _link(src: str, dst: str, bandwidth_bps: float, latency_s: float) -> dict[str, Any]:
    return {"ends": [src, dst], "bandwidth": bandwidth_bps, "latency": latency_s}
