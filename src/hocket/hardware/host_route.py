"""Route between a device and the memory of its host, for offloading and fetching tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hocket.base.errors import InputFileError
from hocket.hardware.cluster import Cluster, Device, Link


@dataclass(frozen=True, kw_only=True)
class HostRoute:
    """Bandwidth per direction while both directions are busy, and the latency."""

    out_bps: float
    """Bytes per second to the host."""
    in_bps: float
    """Bytes per second from the host."""
    latency_s: float


def host_route(cluster: Cluster, device: Device) -> HostRoute:
    """Fastest path between a device and its host; a CPU copies within its own memory."""
    try:
        out_bps, out_s = _rate_and_latency(cluster, device.name, device.host)
        in_bps, in_s = _rate_and_latency(cluster, device.host, device.name)
    except InputFileError:
        # No path exists, as in a cluster of one device without links: copies stay in its own
        # memory.
        out_bps = in_bps = out_s = in_s = 0.0
    if device.kind.is_cpu or not out_bps:
        # A copy reads and writes the same memory (half), and both directions share it (half again).
        out_bps = in_bps = device.kind.memory_bandwidth_bps / 4
        out_s = in_s = device.kind.launch_s
    return HostRoute(out_bps=out_bps, in_bps=in_bps, latency_s=max(out_s, in_s))


def with_host_route(cluster: Cluster, device: Device, route: HostRoute) -> Cluster:
    """Replace the links between a device and its host; links to other devices are unchanged."""
    devices = set(cluster.device_names)
    kept = [
        link
        for link in cluster.links
        if device.name not in link.ends or devices.issuperset(link.ends)
    ]
    ends = {(device.name, device.host): route.out_bps, (device.host, device.name): route.in_bps}
    routes = [
        Link(
            name=f"{src}-to-{dst}",
            ends=(src, dst),
            bandwidth_bps=rate_bps,
            latency_s=route.latency_s,
            duplex="one-way",
        )
        for (src, dst), rate_bps in ends.items()
    ]
    return replace(cluster, links=(*kept, *routes))


def _rate_and_latency(cluster: Cluster, src: str, dst: str) -> tuple[float, float]:
    wiring = cluster.wiring
    start, stop = wiring.number[src], wiring.number[dst]
    path = wiring.path_to(stop, start, wiring.fastest_paths(start, stop))
    # If a channel is shared, both directions are busy at once and each gets half of it.
    rates_bps = [step.link.bandwidth_bps / (2 if step.link.is_shared else 1) for step in path]
    return min(rates_bps), sum(step.link.latency_s for step in path)
