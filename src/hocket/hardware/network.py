"""Bandwidth of a cluster in parallel training: inside a host, and between hosts.

Parallel groups are many and alike, so two figures represent all pairs of devices: the bandwidth of
each device while all devices of a host send around a ring inside it, and while all send to another
host. Only one host of each composition and a second host are examined, and places of other hosts
are skipped, so a cluster of thousands of devices takes a fraction of a second. O(links).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hocket.hardware.cluster import Cluster, Device


@dataclass(frozen=True, kw_only=True)
class Network:
    """Bandwidths between the devices of a cluster while all of them send."""

    num_devices: int
    devices_per_host: int
    """Smallest number of devices in any host."""
    inside_bps: float
    """Bytes per second from each device to a neighbour in the same host."""
    inside_latency_s: float
    between_bps: float
    """Bytes per second from each device to another host while all devices of the host send."""
    between_latency_s: float


def find_network(cluster: Cluster) -> Network:
    """Bandwidth and latency inside and between hosts; the worst values if hosts differ."""
    by_host: dict[str, list[Device]] = defaultdict(list)
    for device in cluster.devices:
        by_host[device.host].append(device)
    owner = _owners(cluster)
    first, *others = _representatives(by_host)
    inside = [
        _shared_rates(cluster, owner, _ring(by_host[host]))
        for host in dict.fromkeys((first, *others[:-1]))
    ]
    between = [
        _shared_rates(cluster, owner, _across(by_host[first], by_host[host]))
        for host in dict.fromkeys(others)
    ]
    # A single host has no other hosts; the figures only fill the fields and are never used.
    between = between or inside
    return Network(
        num_devices=cluster.num_devices,
        devices_per_host=min(len(devices) for devices in by_host.values()),
        inside_bps=min(rate_bps for rate_bps, _ in inside),
        inside_latency_s=max(latency_s for _, latency_s in inside),
        between_bps=min(rate_bps for rate_bps, _ in between),
        between_latency_s=max(latency_s for _, latency_s in between),
    )


def find_networks(cluster: Cluster) -> dict[str, Network]:
    """The network among the devices of each type alone, by type name."""
    if len(cluster.kinds) == 1:
        return {cluster.kinds[0].name: cluster.network}
    names = {
        kind.name: [device.name for device in cluster.devices if device.kind.name == kind.name]
        for kind in cluster.kinds
    }
    return {kind: find_network(cluster.only(own)) for kind, own in names.items()}


def _representatives(by_host: Mapping[str, Sequence[Device]]) -> list[str]:
    """The first host, the first host of every other composition, and the second host of the
    cluster.
    """
    first_of: dict[tuple[str, ...], str] = {}
    for host, devices in by_host.items():
        first_of.setdefault(tuple(sorted(device.kind.name for device in devices)), host)
    return [*first_of.values(), *list(by_host)[1:2]]


def _owners(cluster: Cluster) -> dict[str, str]:
    """Host of each place that only links devices of one host."""
    host_of = {device.name: device.host for device in cluster.devices}
    hosts: dict[str, set[str]] = defaultdict(set)
    for link in cluster.links:
        linked = {host_of[end] for end in link.ends if end in host_of}
        for end in link.ends:
            hosts[end] |= linked
    return {place: next(iter(found)) for place, found in hosts.items() if len(found) == 1}


def _ring(devices: Sequence[Device]) -> Iterable[tuple[Device, Device]]:
    """Pairs in which every device of a host sends to the next one."""
    return zip(devices, [*devices[1:], devices[0]], strict=True)


def _across(
    sources: Sequence[Device], targets: Sequence[Device]
) -> Iterable[tuple[Device, Device]]:
    """Pairs in which every device of one host sends to its counterpart in another."""
    count = max(len(sources), len(targets))
    return ((sources[i % len(sources)], targets[i % len(targets)]) for i in range(count))


def _shared_rates(
    cluster: Cluster, owner: Mapping[str, str], pairs: Iterable[tuple[Device, Device]]
) -> tuple[float, float]:
    """Bandwidth of each of several concurrent transfers, and the largest latency."""
    wiring = cluster.wiring
    load: Counter[int] = Counter()
    latency_s = 0.0
    for src, dst in pairs:
        near = (src.host, dst.host)
        start, stop = wiring.number[src.name], wiring.number[dst.name]

        def is_near(place: int, near: tuple[str, str] = near) -> bool:
            return owner.get(wiring.places[place], near[0]) in near

        reached = wiring.fastest_paths(start, stop, is_near)
        path = wiring.path_to(stop, start, reached)
        load.update(step.channel for step in path)
        latency_s = max(latency_s, sum(step.link.latency_s for step in path))
    rates_bps = (wiring.channel_bandwidth_bps[channel] / n for channel, n in load.items())
    return min(rates_bps, default=float("inf")), latency_s
