"""Bandwidth of a cluster's links in parallel training: inside a host, and between hosts.

Parallel groups are many and alike, so two figures stand for all pairs of devices: what each device
gets while all devices of a host send around a ring inside it, and while all send to another host.
Only one host of each make and a second one are looked at, and places that belong to other hosts are
left out, so that a cluster of thousands of devices takes a fraction of a second. O(links).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hocket.base.errors import InputFileError
from hocket.hardware.cluster import Cluster, Device, Link
from hocket.hardware.routes import REFERENCE_BYTES

Channel = tuple[str, str]
"""A link and the place that is left through it; for a bus, its name alone."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Bandwidths between the devices of a cluster when all of them send."""

    num_devices: int
    devices_per_host: int
    """The least number that any host has."""
    inside_bps: float
    """Bytes per second and device to a neighbour in the same host."""
    inside_latency_s: float
    between_bps: float
    """Bytes per second and device to another host while all devices of the host send."""
    between_latency_s: float


@dataclass(frozen=True)
class _Path:
    channels: tuple[Channel, ...]
    latency_s: float


@dataclass(frozen=True)
class _SharedRates:
    """Bandwidth of each of several concurrent transfers."""

    bandwidth_bps: float
    latency_s: float


_NOTHING = _SharedRates(float("inf"), 0.0)


def find_network(cluster: Cluster) -> Network:
    """Bandwidth and latency inside and between the hosts; the slowest where they vary."""
    by_host: dict[str, list[Device]] = defaultdict(list)
    for device in cluster.devices:
        by_host[device.host].append(device)
    links = _Links(cluster, by_host)
    first, *others = _representatives(by_host)
    inside = [links.ring(by_host[host]) for host in dict.fromkeys((first, *others[:-1]))]
    between = [links.across(by_host[first], by_host[host]) for host in dict.fromkeys(others)]
    # One host alone has no network; what it would give is never asked for.
    between = between or inside
    return Network(
        num_devices=cluster.num_devices,
        devices_per_host=min(len(devices) for devices in by_host.values()),
        inside_bps=min(flow.bandwidth_bps for flow in inside),
        inside_latency_s=max(flow.latency_s for flow in inside),
        between_bps=min(flow.bandwidth_bps for flow in between),
        between_latency_s=max(flow.latency_s for flow in between),
    )


def find_networks(cluster: Cluster) -> dict[str, Network]:
    """The network among the devices of each kind alone, by the kind's name."""
    if len(cluster.kinds) == 1:
        return {cluster.kinds[0].name: cluster.network}
    names = {
        kind.name: [device.name for device in cluster.devices if device.kind.name == kind.name]
        for kind in cluster.kinds
    }
    return {kind: find_network(cluster.only(own)) for kind, own in names.items()}


def _representatives(by_host: Mapping[str, Sequence[Device]]) -> list[str]:
    """The first host, the first of every other make, and the second host of all."""
    first_of: dict[tuple[str, ...], str] = {}
    for host, devices in by_host.items():
        first_of.setdefault(tuple(sorted(device.kind.name for device in devices)), host)
    hosts = list(first_of.values())
    return [*hosts, *list(by_host)[1:2]]


class _Links:
    """Paths between devices over the links of a cluster."""

    def __init__(self, cluster: Cluster, by_host: Mapping[str, Sequence[Device]]) -> None:
        self._host_of = {d.name: host for host, devices in by_host.items() for d in devices}
        self._name = cluster.name
        self._bandwidth_bps = {link.name: link.bandwidth_bps for link in cluster.links}
        self._links: dict[str, list[Link]] = defaultdict(list)
        for link in cluster.links:
            for end in link.ends:
                self._links[end].append(link)
        self._owner = self._owners(cluster)

    def _owners(self, cluster: Cluster) -> dict[str, str]:
        """Hosts of the places that link the devices of one host only."""
        hosts: dict[str, set[str]] = defaultdict(set)
        for link in cluster.links:
            linked = {self._host_of[end] for end in link.ends if end in self._host_of}
            for end in link.ends:
                hosts[end] |= linked
        return {place: next(iter(found)) for place, found in hosts.items() if len(found) == 1}

    def ring(self, devices: Sequence[Device]) -> _SharedRates:
        """All devices of a host sending to the next."""
        names = [device.name for device in devices]
        return self._flow(zip(names, [*names[1:], names[0]], strict=True))

    def across(self, sources: Sequence[Device], targets: Sequence[Device]) -> _SharedRates:
        """All devices of one host sending to their counterparts in another."""
        count = max(len(sources), len(targets))
        return self._flow(
            (sources[i % len(sources)].name, targets[i % len(targets)].name) for i in range(count)
        )

    def _flow(self, pairs: Iterable[tuple[str, str]]) -> _SharedRates:
        paths = [self._path(src, dst) for src, dst in pairs if src != dst]
        load = Counter(channel for path in paths for channel in path.channels)
        if not load:
            return _NOTHING
        return _SharedRates(
            min(self._bandwidth_bps[name] / count for (name, _), count in load.items()),
            max(path.latency_s for path in paths),
        )

    def _path(self, src: str, dst: str) -> _Path:
        """The path with the least sum of link times (Dijkstra); devices do not forward."""
        near = {self._host_of[src], self._host_of[dst]}
        queue: list[tuple[float, int, str, _Path]] = [(0.0, 0, src, _Path((), 0.0))]
        done: set[str] = set()
        counter = 0
        while queue:
            cost, _, place, path = heapq.heappop(queue)
            if place == dst:
                return path
            if place in done or (place in self._host_of and place != src):
                continue
            done.add(place)
            for link in self._links[place]:
                shared = link.is_bus or link.duplex == "half"
                channel = (link.name, "" if shared else place)
                longer = _Path((*path.channels, channel), path.latency_s + link.latency_s)
                time_s = link.latency_s + REFERENCE_BYTES / link.bandwidth_bps
                ends = link.ends[1:] if link.duplex == "one-way" else link.ends
                if link.duplex == "one-way" and place != link.ends[0]:
                    continue
                for end in ends:
                    if end not in done and self._owner.get(end, src) in (*near, src):
                        counter += 1
                        heapq.heappush(queue, (cost + time_s, counter, end, longer))
        raise InputFileError(
            f"no path from {src!r} to {dst!r}",
            hint="add a link, a host or a switch between them; devices do not forward",
            where=self._name,
        )
