"""The route from a device to the memory of its host: used by offloading and fetching.

The widest path over links, hosts and switches (Dijkstra on the narrowest link); devices do not
forward. O(links log links).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hocket.hardware.cluster import Cluster, Device, Link


@dataclass(frozen=True, kw_only=True)
class HostRoute:
    """Bytes per second in each direction while both are busy, and the time before the first."""

    out_bps: float
    """To the host."""
    in_bps: float
    """From the host."""
    latency_s: float


def host_route(cluster: Cluster, device: Device) -> HostRoute:
    """The route between a device and its host; a CPU copies within its own memory."""
    out = _widest(cluster, device.name, device.host)
    back = _widest(cluster, device.host, device.name)
    if device.kind.is_cpu or out is None or back is None:
        # Reading and writing, each way.
        copy_bps = device.kind.memory_bandwidth_bps / 4
        return HostRoute(out_bps=copy_bps, in_bps=copy_bps, latency_s=device.kind.launch_s)
    return HostRoute(out_bps=out[0], in_bps=back[0], latency_s=max(out[1], back[1]))


def with_host_route(cluster: Cluster, device: Device, route: HostRoute) -> Cluster:
    """Replace the route between a device and its host; links to other devices stay."""
    devices = set(cluster.device_names)
    kept = [
        link
        for link in cluster.links
        if device.name not in link.ends or devices.issuperset(link.ends)
    ]
    routes = [
        Link(
            name=f"{ends[0]}-to-{ends[1]}",
            ends=ends,
            bandwidth_bps=rate_bps,
            latency_s=route.latency_s,
            duplex="one-way",
        )
        for ends, rate_bps in (
            ((device.name, device.host), route.out_bps),
            ((device.host, device.name), route.in_bps),
        )
    ]
    return replace(cluster, links=(*kept, *routes))


def _widest(cluster: Cluster, src: str, dst: str) -> tuple[float, float] | None:
    """Rate and latency of the widest path; None where there is none."""
    devices = set(cluster.device_names)
    best: dict[str, float] = {}
    queue = [(-float("inf"), 0.0, src)]
    while queue:
        negative_bps, latency_s, place = heapq.heappop(queue)
        if place == dst:
            return -negative_bps, latency_s
        if place in best or (place in devices and place != src):
            continue
        best[place] = -negative_bps
        for link in cluster.links:
            for target, bps in _steps(link, place):
                rate = min(-negative_bps, bps)
                heapq.heappush(queue, (-rate, latency_s + link.latency_s, target))
    return None


def _steps(link: Link, place: str) -> Iterator[tuple[str, float]]:
    if place not in link.ends:
        return
    if link.duplex == "one-way":
        if place == link.ends[0]:
            yield link.ends[1], link.bandwidth_bps
        return
    # Both directions of a shared channel are busy at once, so each has half of it.
    is_shared = link.is_bus or link.duplex == "half"
    for target in link.ends:
        if target != place:
            yield target, link.bandwidth_bps / (2 if is_shared else 1)
