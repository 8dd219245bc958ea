"""Read a machine from the XML topology that NCCL and RCCL write (``NCCL_TOPO_DUMP_FILE``).

The file is the PCIe tree of the driver, with the NVLink or xGMI links of each GPU and the network
adapters. Bandwidths follow NCCL's own model: PCIe at three quarters of nominal, NVLink and xGMI by
GPU generation, links between CPUs by vendor. PCIe switches with a single child are retained,
because they may be slower than the devices below them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hocket.base.errors import InputFileError
from hocket.base.fields import shown
from hocket.base.regular import read_regular
from hocket.base.units import whole_number
from hocket.hardware.files import MAX_FILE_BYTES, Machine, machine_from_dict

_LANE_GBPS = {"2.5": 0.1875, "5": 0.375, "8": 0.75, "16": 1.5, "32": 3.0, "64": 6.0}
"""GB/s of one PCIe lane by its speed in GT/s."""
_NVLINK_GBPS = ((100, 40.1), (90, 20.6), (86, 12.0), (70, 20.0), (60, 18.0))
"""GB/s of one NVLink by minimum compute capability, the largest capability first."""
_XGMI_GBPS = (("94", 48.0), ("95", 57.0), ("910", 36.0), ("90a", 36.0), ("", 24.0))
"""GB/s of one xGMI link by a substring of the GPU's architecture name."""
_KINDS = (
    ("950", "mi300x"), ("94", "mi300x"), ("910", "mi250-64g"), ("90a", "mi250-64g"),
    ("908", "mi100-32g"), ("", "mi50-16g"),
)  # fmt: skip
_NVIDIA_KINDS = ((90, "h100-80g"), (80, "a100-40g"), (70, "v100-16g"), (60, "p100-16g"))
_NVSWITCH = "0x068000"
_PCIE_LATENCY_S, _PEER_LATENCY_S, _SOCKET_LATENCY_S = 1e-6, 2e-6, 1e-6
_MAX_NUMBER = 10**6
"""Largest accepted model or capability number; larger ones are treated as missing."""
_MAX_LANES = 32
_MAX_NETWORK_GBPS = 100.0
"""Bandwidth assumed for adapters that state more: they are virtual, and their true bandwidth is
unknown.
"""


def read_nccl_machine(path: str | Path) -> Machine:
    """The machine of a topology file; raises `InputFileError` that names the file."""
    where = str(path)
    content = read_regular(path, MAX_FILE_BYTES)
    # Nested entities could expand to gigabytes ("billion laughs").
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise InputFileError("defines a document type; topologies have none", where=where)
    try:
        top = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise InputFileError(f"is not XML: {error}", where=where) from None
    if top.tag != "system":
        raise InputFileError(
            f"the top element is {shown(top.tag)}, not 'system'",
            hint="dump a topology with NCCL_TOPO_DUMP_FILE=topology.xml",
            where=where,
        )
    return machine_from_dict(_Elements(top, where).as_data(), where, default_name=Path(path).stem)


class _Elements:
    """Collect devices, switches and links from the XML elements."""

    def __init__(self, top: Element, where: str) -> None:
        self.where = where
        self.gpus: list[tuple[int, str, Element]] = []
        """(number, bus id, element) of each GPU."""
        self.switches: list[str] = []
        self.links: list[dict[str, Any]] = []
        self.adapters: dict[str, float] = {}
        """GB/s of the fastest network adapter by the place to which it is attached."""
        self.parent: dict[str, tuple[str, float]] = {}
        """Parent of each GPU by bus id, and the bandwidth of the link to it."""
        cpus = top.findall("cpu")
        if not cpus:
            raise InputFileError("has no 'cpu' element", where=where)
        names = ["host"] if len(cpus) == 1 else [f"socket{n}" for n in range(len(cpus))]
        for name, cpu in zip(names, cpus, strict=True):
            for child in cpu:
                self._walk(child, name)
        if len(cpus) > 1:
            self._join_sockets(names, cpus)

    def _join_sockets(self, names: list[str], cpus: list[Element]) -> None:
        self.switches = [*names, *self.switches]
        for first, name in enumerate(names):
            for second in range(first + 1, len(names)):
                rate = min(_socket_gbps(cpus[first]), _socket_gbps(cpus[second]))
                self._link(name, names[second], rate, _SOCKET_LATENCY_S)
        # Memory is attached to the first socket only: with two links, routes would avoid the link
        # between the sockets.
        self._link(names[0], "host", 100.0, 0.0)

    def _walk(self, element: Element, above: str) -> None:
        if element.tag == "nic":
            for net in element.findall("net"):
                gbps = self._number(net, "speed", 10_000) / 8000
                best = max(self.adapters.get(above, 0.0), min(gbps, _MAX_NETWORK_GBPS))
                self.adapters[above] = best
            return
        if element.tag != "pci":
            return
        bus = element.get("busid", "")
        rate = self._pcie_gbps(element)
        gpu = element.find("gpu")
        if gpu is not None:
            self.gpus.append((int(self._number(gpu, "dev", len(self.gpus))), bus.lower(), gpu))
            self.parent[bus.lower()] = (above, rate)
            return
        nic = element.find("nic")
        if nic is not None:
            self._walk(nic, above)
            return
        name = self._bridge_name(bus)
        self.switches.append(name)
        self._link(name, above, rate, _PCIE_LATENCY_S)
        for child in element:
            self._walk(child, name)

    def _bridge_name(self, bus: str) -> str:
        """An unused name for a PCIe bridge."""
        first = "pci-" + bus.replace(":", ".").lower()
        # RCCL gives each downstream port the bus id of its switch, so bus ids may repeat.
        names = (first, *(f"{first}-{number}" for number in range(2, len(self.switches) + 3)))
        return next(name for name in names if name not in self.switches)

    def as_data(self) -> dict[str, Any]:
        """The machine in the schema of the TOML files."""
        if not self.gpus:
            raise InputFileError("has no GPU", where=self.where)
        self.gpus.sort(key=lambda gpu: gpu[0])
        name_of = {bus: f"gpu{n}" for n, (_, bus, _) in enumerate(self.gpus)}
        self._peer_links(name_of)
        for _, bus, _ in self.gpus:
            above, rate = self.parent[bus]
            self._link(name_of[bus], above, rate, 2.5 * _PCIE_LATENCY_S)
        data: dict[str, Any] = {
            "devices": [{"kind": _kind(gpu), "count": 1} for _, _, gpu in self.gpus],
            "hosts": ["host"],
            "switches": self.switches,
            "links": self.links,
        }
        if self.adapters:
            rate = min(self.adapters.values())
            network = {"at": sorted(self.adapters), "bandwidth": rate * 1e9, "latency": 2.5e-6}
            data["network"] = network
        return data

    def _peer_links(self, name_of: dict[str, str]) -> None:
        """Add each link between GPUs once, and one switch for all NVSwitches."""
        rates: dict[tuple[str, str], float] = {}
        for _, bus, gpu in self.gpus:
            for target, gbps in self._peers(gpu, name_of):
                # Names of GPUs sort before that of the switch.
                a, b = sorted((name_of[bus], target))
                known = rates.get((a, b), 0.0)
                # Links to a switch add up. A link between two GPUs is listed by both, so it counts
                # once, with the larger rate.
                rates[a, b] = known + gbps if target == "nvswitch" else max(known, gbps)
        if any("nvswitch" in ends for ends in rates):
            self.switches.append("nvswitch")
        for (a, b), gbps in rates.items():
            latency_s = _PEER_LATENCY_S / 2 if b == "nvswitch" else _PEER_LATENCY_S
            self._link(a, b, gbps, latency_s)

    def _peers(self, gpu: Element, name_of: dict[str, str]) -> Iterator[tuple[str, float]]:
        for link in gpu:
            if link.tag not in ("nvlink", "xgmi"):
                continue
            gbps = self._number(link, "count", 1) * _peer_gbps(gpu, link.tag)
            target = link.get("target", "").lower()
            if target in name_of:
                yield name_of[target], gbps
            elif link.get("tclass", "").lower().startswith(_NVSWITCH):
                yield "nvswitch", gbps

    def _link(self, a: str, b: str, gbps: float, latency_s: float) -> None:
        self.links.append({"ends": [a, b], "bandwidth": gbps * 1e9, "latency": latency_s})

    def _pcie_gbps(self, element: Element) -> float:
        speed = element.get("link_speed", "8").split(" ")[0].removesuffix(".0")
        # Virtual machines report 0 lanes.
        width = element.get("link_width") or "0"
        lanes = whole_number(width, _MAX_LANES)
        if lanes is None:
            raise InputFileError(
                f"link_width={shown(width)} of <pci> is not a number of lanes up to {_MAX_LANES}",
                where=self.where,
            )
        return (lanes or 16) * _LANE_GBPS.get(speed, 0.75)

    def _number(self, element: Element, key: str, default: float) -> float:
        text = element.get(key)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e12:
            raise InputFileError(
                f"{key}={shown(text)} of <{element.tag}> is not a number", where=self.where
            )
        return value


def _socket_gbps(cpu: Element) -> float:
    if cpu.get("vendor") == "AuthenticAMD":
        return 16.0
    model = cpu.get("modelid", "0")
    return 10.0 if (whole_number(model, _MAX_NUMBER) or 0) >= 0x55 else 6.0


def _peer_gbps(gpu: Element, tag: str) -> float:
    if tag == "xgmi":
        architecture = gpu.get("gcn", "")
        return next(gbps for part, gbps in _XGMI_GBPS if part in architecture)
    number = _capability(gpu)
    return next((gbps for least, gbps in _NVLINK_GBPS if number >= least), 18.0)


def _kind(gpu: Element) -> str:
    architecture = gpu.get("gcn")
    if architecture is not None:
        return next(kind for part, kind in _KINDS if part in architecture)
    number = _capability(gpu)
    return next((kind for least, kind in _NVIDIA_KINDS if number >= least), "p100-16g")


def _capability(gpu: Element) -> int:
    found = whole_number(gpu.get("sm", "70"), _MAX_NUMBER)
    return 70 if found is None else found
