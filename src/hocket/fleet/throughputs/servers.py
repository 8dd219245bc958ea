"""Servers of one device type, and the links between the members of a gang.

A gang is consolidated if it fills as few servers as possible, and spread if each member is on a
server of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import UsageError
from hocket.cost.collectives import RingPath, ring_path
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.hardware.kinds import preset_kinds
from hocket.hardware.shorthand import MOST_PER_HOST, NETWORK, PER_HOST, cluster_from_text

# The ring of a gang: devices of a server that are joined by the fastest links. Collective libraries
# search for rings over the best links of a server (NCCL at its start). Here bandwidths are tried
# from the highest down. For each, a depth-first search looks for a cycle of the wanted length over
# pairs with at least this bandwidth; the first one found is the widest ring. This is exponential in
# the worst case, so after a fixed number of extensions the devices are taken in order. Present
# servers need a few dozen.

_MAX_EXTENSIONS = 20_000


def widest_ring(bandwidth_bps: FloatArray, length: int) -> tuple[int, ...]:
    """Order devices in the ring with the highest bottleneck bandwidth; ``bandwidth_bps`` is
    ``[device, device]``."""
    mutual_bps = np.minimum(bandwidth_bps, bandwidth_bps.T)
    np.fill_diagonal(mutual_bps, 0.0)
    search = _CycleSearch(length)
    for threshold_bps in np.unique(mutual_bps[mutual_bps > 0.0])[::-1]:
        ring = search.ring(mutual_bps >= threshold_bps)
        if ring:
            return ring
    return tuple(range(length))


class _CycleSearch:
    """Depth-first search for cycles with one budget for all thresholds."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._extensions_left = _MAX_EXTENSIONS

    def ring(self, joined: BoolArray) -> tuple[int, ...]:
        """A cycle over joined pairs; empty if none is found."""
        near = [np.flatnonzero(row).tolist() for row in joined]
        for first in range(len(near) - self._length + 1):
            # A cycle is found from its device with the lowest number, so only later devices are
            # tried.
            path = self._extend([first], near)
            if path:
                return tuple(path)
        return ()

    def _extend(self, path: list[int], near: list[list[int]]) -> list[int]:
        if len(path) == self._length:
            return path if path[0] in near[path[-1]] else []
        for device in near[path[-1]]:
            if device <= path[0] or device in path:
                continue
            if self._extensions_left == 0:
                return []
            self._extensions_left -= 1
            found = self._extend([*path, device], near)
            if found:
                return found
        return []


SPREAD = "_unconsolidated"
"""Suffix of the name of a type where the members of a gang are on different servers."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Any number of equal servers; the devices of one server may be unequal."""

    name: str
    """Name of this device type in the fleet."""
    hardware: str
    """The preset or file that was taken for it."""
    server: Cluster
    between: RingPath
    """Bandwidth from a device of one server to a device of the next."""

    @property
    def kind(self) -> DeviceKind:
        """The device type of all devices, or of the first where they are unequal."""
        return self.server.kinds[0]

    @property
    def is_unequal(self) -> bool:
        """True if a server has devices of several types: it is then taken whole."""
        return len(self.server.kinds) > 1

    def consolidated(self, gang: int) -> RingPath:
        """The ring of a gang on as few servers as possible."""
        inside = min(gang, self.server.num_devices)
        if inside == 1:
            return self.between
        path = ring_path(self.server, widest_ring(self.server.routes.bandwidth_bps, inside))
        return path if inside == gang else _slower(path, self.between)


def find_servers(
    text: str, network_bps: float | None = None, *, is_unequal_allowed: bool = False
) -> Servers:
    """Servers of what ``NAME`` or ``NAME=HARDWARE`` says: a device type, a machine, or a file.

    A device type that comes with several sizes of memory stands for the smallest. Device types are
    in servers of eight, joined by PCIe and a network of 100 Gbit/s; machines have their own links.
    What each of their adapters does in ``network_bps`` goes before both.
    """
    name, equals, hardware = (part.strip() for part in text.partition("="))
    if not name or name.endswith(SPREAD) or (equals and not hardware):
        hint = "write it like v100, k80 or v100=dgx1-v100"
        raise UsageError(f"cannot read {text!r} as a device type", hint=hint)
    hardware = _preset(hardware or name)
    is_kind = hardware in preset_kinds()
    server = cluster_from_text(f"{PER_HOST}x{hardware}" if is_kind else hardware)
    if len(server.kinds) != 1 and not is_unequal_allowed:
        raise UsageError(
            f"{hardware!r} has devices of {len(server.kinds)} device types",
            hint="name hardware with devices of one type, such as dgx1-v100",
        )
    # Two hosts: one device more than the shorthand of clusters puts on one host.
    two = cluster_from_text(f"{MOST_PER_HOST + 1}x{hardware}" if is_kind else f"2x{hardware}")
    if network_bps is not None:
        two = _with_network(two, network_bps)
    return Servers(name=name, hardware=hardware, server=server, between=_between(two))


def _preset(name: str) -> str:
    """The device type of a short name, the one with the least memory of several."""
    kinds = preset_kinds()
    if name.lower() in kinds:
        return name.lower()
    longer = [known for known in kinds if known.startswith(f"{name.lower()}-")]
    return min(longer, key=lambda known: kinds[known].kind.memory_bytes, default=name)


def _with_network(cluster: Cluster, bandwidth_bps: float) -> Cluster:
    links = (
        replace(link, bandwidth_bps=bandwidth_bps) if NETWORK in link.ends else link
        for link in cluster.links
    )
    return replace(cluster, links=tuple(links))


def _between(cluster: Cluster) -> RingPath:
    first = cluster.devices[0].host
    other = next(at for at, device in enumerate(cluster.devices) if device.host != first)
    return ring_path(cluster, (0, other))


def _slower(one: RingPath, other: RingPath) -> RingPath:
    return RingPath(
        latency_s=max(one.latency_s, other.latency_s),
        bandwidth_bps=min(one.bandwidth_bps, other.bandwidth_bps),
    )
