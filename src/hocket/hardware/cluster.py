"""The Cluster: devices, hosts, switches and links as small frozen values.

Devices compute and hold memory. Links connect places: devices, hosts and switches. Devices never
forward traffic for others; hosts and switches do. A link with more than two ends is a shared bus.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hocket.base.errors import InputFileError, UsageError
from hocket.base.units import format_bytes

if TYPE_CHECKING:
    from hocket.hardware.network import Network
    from hocket.hardware.routes import Routes, Wiring

Duplex = Literal["full", "half", "one-way"]

UNSTATED_HOST_UPDATE_BPS = 80e9
"""Bytes per second of 16 cores of an H200's host in PyTorch's fused AdamW. A second such machine
reached 136e9.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A type of accelerator or CPU, with the figures of its datasheet."""

    name: str
    memory_bytes: int
    headroom_bytes: int = 0
    """Bytes that no plan may use: the CUDA context, library workspaces and fragmentation."""
    peak_flops: Mapping[str, float]
    """Operations per second by dtype (see `hocket.graph.DTYPES`, plus ``tf32``)."""
    memory_bandwidth_bps: float
    launch_s: float = 0.0
    """Shortest time that any op occupies the device."""
    dispatch_s: float = 0.0
    """Mean time in which the host dispatches one op of a small transformer block, forward and
    backward.

    Measured by ``hocket detect``; 0 if not measured.
    """
    price_per_hour: float = 0.0
    """US dollars for one device for one hour; 0 if unknown."""
    is_cpu: bool = False
    source: str = ""
    """Source of the figures."""

    def peak_for(self, dtype: str) -> float:
        """Peak operations per second in a dtype; the highest peak if none is stated for it."""
        return self.peak_flops.get(dtype, max(self.peak_flops.values()))


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of a cluster."""

    name: str
    kind: DeviceKind
    host: str
    memory_bytes: int
    """Memory of this device, which may be less than that of its type."""

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may fill: the memory without the headroom of the device type."""
        return max(0, self.memory_bytes - self.kind.headroom_bytes)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between two places, or a bus between more."""

    name: str
    ends: tuple[str, ...]
    """Names of devices, hosts or switches; more than two ends make a shared bus."""
    bandwidth_bps: float
    """Bytes per second. Full duplex: in each direction. Half duplex or bus: in all directions
    together. One-way: from the first end to the second.
    """
    latency_s: float
    duplex: Duplex = "full"

    @property
    def is_bus(self) -> bool:
        """True if more than two places share the link."""
        return len(self.ends) > 2

    @property
    def is_shared(self) -> bool:
        """True if all ends and both directions share one channel."""
        return self.is_bus or self.duplex == "half"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, the places that forward traffic, and the links between them."""

    name: str
    devices: tuple[Device, ...]
    hosts: tuple[str, ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    host_update_bps: float = UNSTATED_HOST_UPDATE_BPS
    """Bytes per second that all CPU cores of a host read and write while they update optimizer
    state in host memory.
    """
    uses_stated_times: bool = False
    """True if transfer times come from the graph's file instead of the links."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Free notes without effect on plans."""

    def __post_init__(self) -> None:
        known: dict[str, DeviceKind] = {}
        for device in self.devices:
            kind = known.setdefault(device.kind.name, device.kind)
            # Most devices share one object: comparing its fields for each device would take long.
            if kind is not device.kind and kind != device.kind:
                raise InputFileError(
                    f"two kinds of device have the name {kind.name!r} but not the same figures",
                    hint="give each kind a name of its own",
                    where=self.name,
                )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """Distinct device kinds in order of first appearance."""
        return tuple({device.kind.name: device.kind for device in self.devices}.values())

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices in order."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def number_of(self) -> Mapping[str, int]:
        """Position of each device by its name."""
        return {name: number for number, name in enumerate(self.device_names)}

    @cached_property
    def wiring(self) -> Wiring:
        """Links by place, and the fastest paths over them."""
        from hocket.hardware.routes import Wiring

        return Wiring(self)

    @cached_property
    def routes(self) -> Routes:
        """Paths, latencies and bandwidths between all pairs of devices."""
        from hocket.hardware.routes import find_routes

        return find_routes(self)

    @cached_property
    def network(self) -> Network:
        """Bandwidth of each device inside its host and between hosts, for clusters of any size."""
        from hocket.hardware.network import find_network

        return find_network(self)

    @cached_property
    def networks(self) -> Mapping[str, Network]:
        """The network among the devices of each kind alone, by the kind's name."""
        from hocket.hardware.network import find_networks

        return find_networks(self)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of everything that can change a plan; sources and notes are excluded."""
        content = {
            "name": self.name,
            "uses_stated_times": self.uses_stated_times,
            "hosts": self.hosts,
            "switches": self.switches,
            "kinds": [_kind_content(kind) for kind in self.kinds],
            "devices": [(d.name, d.kind.name, d.host, int(d.memory_bytes)) for d in self.devices],
            "links": [
                (x.name, x.ends, float(x.bandwidth_bps), float(x.latency_s), x.duplex)
                for x in self.links
            ],
        }
        # The default is excluded, so that a file that states the default explicitly has the same
        # hash.
        if self.host_update_bps != UNSTATED_HOST_UPDATE_BPS:
            content["host_update_bps"] = float(self.host_update_bps)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def only(self, names: Collection[str]) -> Cluster:
        """The cluster reduced to the named devices and the links between them."""
        gone = set(self.device_names).difference(names)
        return replace(
            self,
            devices=tuple(device for device in self.devices if device.name not in gone),
            links=tuple(link for link in self.links if gone.isdisjoint(link.ends)),
        )

    def with_headroom(self, headroom_bytes: int) -> Cluster:
        """The cluster with the same headroom on every device; raises `UsageError` if a device is
        smaller.
        """
        least = min(device.memory_bytes for device in self.devices)
        if not 0 <= headroom_bytes < least:
            raise UsageError(
                f"a headroom of {format_bytes(headroom_bytes)} leaves nothing of the "
                f"{format_bytes(least)} of the smallest device",
                hint="keep less free",
            )
        kinds = {kind.name: replace(kind, headroom_bytes=headroom_bytes) for kind in self.kinds}
        devices = tuple(replace(device, kind=kinds[device.kind.name]) for device in self.devices)
        return replace(self, devices=devices)

    @property
    def price_per_hour(self) -> float:
        """US dollars per hour for all devices together."""
        return sum(device.kind.price_per_hour for device in self.devices)

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.kind.name] = counts.get(device.kind.name, 0) + 1
        content = " + ".join(f"{count}x{kind}" for kind, count in counts.items())
        return f"Cluster({self.name!r}, {content})"


def _kind_content(kind: DeviceKind) -> tuple[object, ...]:
    # Equal ints and floats must have equal hashes: files contain floats, code often passes ints.
    return (
        kind.name,
        int(kind.memory_bytes),
        {dtype: float(rate) for dtype, rate in kind.peak_flops.items()},
        float(kind.memory_bandwidth_bps),
        float(kind.launch_s),
        float(kind.price_per_hour),
        kind.is_cpu,
        # The default is excluded, so that a file that states the default explicitly has the same
        # hash.
        *((int(kind.headroom_bytes),) if kind.headroom_bytes else ()),
        *((("dispatch", float(kind.dispatch_s)),) if kind.dispatch_s else ()),
    )
