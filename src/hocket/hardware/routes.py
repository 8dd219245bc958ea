"""Routes: which links a transfer between two devices crosses, and how fast they are.

A channel is what transfers contend for: one per direction of a full-duplex link, one for a
half-duplex link or a bus. The route of a pair is the path with the least time for a reference
transfer (Dijkstra over hosts and switches; devices do not forward), ties by fewer links, then by
position in the file. O(devices · links log links).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from hocket.arrays import ByteArray, FloatArray, IntArray
from hocket.errors import InputFileError
from hocket.hardware.cluster import Cluster, Link

REFERENCE_BYTES = 16 * 2**20
"""Size of the transfer for which routes are the fastest: a typical activation."""
MAX_DEVICES = 1024
"""Above this, all-pairs routes would take gigabytes; planners of such clusters work by level."""


@dataclass(frozen=True, eq=False)
class Routes:
    """All-pairs routes. Pair (src, dst) has the number ``src * num_devices + dst``."""

    channel_names: tuple[str, ...]
    channel_bandwidth_bps: FloatArray
    latency_s: FloatArray
    """[src, dst]: sum of the latencies along the route; 0 on the diagonal."""
    bandwidth_bps: FloatArray
    """[src, dst]: smallest bandwidth along the route; infinite on the diagonal."""
    hops: IntArray
    """[src, dst]: number of links along the route."""
    path_ptr: ByteArray
    path_channels: IntArray
    """Channels of pair p: ``path_channels[path_ptr[p]:path_ptr[p + 1]]``."""
    send_queue: IntArray
    """Per device: the queue that its outgoing transfers share when transfers are queued."""
    receive_queue: IntArray
    """Per device: as `send_queue` for incoming ones; the same queue behind half-duplex links."""

    def path(self, src: int, dst: int) -> IntArray:
        """Channels that a transfer from ``src`` to ``dst`` crosses, in order."""
        pair = src * len(self.send_queue) + dst
        return self.path_channels[self.path_ptr[pair] : self.path_ptr[pair + 1]]


@dataclass(frozen=True)
class _Step:
    """Crossing one link from one place to another."""

    link: Link
    channel: int
    target: str


def find_routes(cluster: Cluster) -> Routes:
    """Routes between all pairs of devices; raises `InputFileError` for an unreachable pair."""
    num = cluster.num_devices
    if num > MAX_DEVICES:
        raise InputFileError(
            f"cluster {cluster.name!r} has {num} devices; op placement handles {MAX_DEVICES}",
            hint="plan for one replica of the model",
        )
    channel_names, channel_bandwidth, steps = _channels(cluster)
    latency = np.zeros((num, num))
    bandwidth = np.full((num, num), np.inf)
    hops = np.zeros((num, num), dtype=np.int32)
    ptr, flat = [0], list[int]()
    for src, device in enumerate(cluster.devices):
        paths = _fastest_paths(device.name, steps, set(cluster.device_names))
        for dst, target in enumerate(cluster.devices):
            if src != dst:
                path = paths.get(target.name)
                if path is None:
                    raise InputFileError(
                        f"no path from {device.name!r} to {target.name!r}",
                        hint="add a link, a host or a switch between them",
                        where=cluster.name,
                    )
                latency[src, dst] = sum(step.link.latency_s for step in path)
                bandwidth[src, dst] = min(step.link.bandwidth_bps for step in path)
                hops[src, dst] = len(path)
                flat.extend(step.channel for step in path)
            ptr.append(len(flat))
    send, receive = _queues(cluster)
    return Routes(
        channel_names=tuple(channel_names),
        channel_bandwidth_bps=np.array(channel_bandwidth, dtype=np.float64),
        latency_s=latency,
        bandwidth_bps=bandwidth,
        hops=hops,
        path_ptr=np.array(ptr, dtype=np.int64),
        path_channels=np.array(flat, dtype=np.int32),
        send_queue=send,
        receive_queue=receive,
    )


def _channels(cluster: Cluster) -> tuple[list[str], list[float], dict[str, list[_Step]]]:
    names: list[str] = []
    bandwidth: list[float] = []
    places = (*cluster.device_names, *cluster.hosts, *cluster.switches)
    steps: dict[str, list[_Step]] = {place: [] for place in places}
    for link in cluster.links:
        if link.is_bus or link.duplex == "half":
            names.append(link.name)
            bandwidth.append(link.bandwidth_bps)
            channel = len(names) - 1
            for src in link.ends:
                steps[src] += [_Step(link, channel, dst) for dst in link.ends if dst != src]
            continue
        for src, dst in (link.ends, link.ends[::-1]):
            names.append(f"{link.name} {src}→{dst}")
            bandwidth.append(link.bandwidth_bps)
            steps[src].append(_Step(link, len(names) - 1, dst))
    return names, bandwidth, steps


def _fastest_paths(
    start: str, steps: dict[str, list[_Step]], devices: set[str]
) -> dict[str, list[_Step]]:
    """Dijkstra by time of the reference transfer, where the slowest link sets the bandwidth.

    Summing size/bandwidth over links instead of taking the slowest one keeps the search exact for
    shortest paths and prefers direct links; the reported bandwidth is the slowest link's.
    """
    best: dict[str, tuple[float, int, list[_Step]]] = {}
    counter = 0
    queue: list[tuple[float, int, int, str, list[_Step]]] = [(0.0, 0, counter, start, [])]
    while queue:
        cost, num_links, _, place, path = heapq.heappop(queue)
        if place in best:
            continue
        best[place] = (cost, num_links, path)
        if place in devices and place != start:
            continue
        for step in steps[place]:
            if step.target not in best:
                counter += 1
                added = step.link.latency_s + REFERENCE_BYTES / step.link.bandwidth_bps
                heapq.heappush(
                    queue, (cost + added, num_links + 1, counter, step.target, [*path, step])
                )
    return {place: path for place, (_, _, path) in best.items()}


def _queues(cluster: Cluster) -> tuple[IntArray, IntArray]:
    """Queue numbers per device: 2d to send and 2d+1 to receive, or 2d for both."""
    num = cluster.num_devices
    send = 2 * np.arange(num, dtype=np.int32)
    receive = send + 1
    for index, device in enumerate(cluster.devices):
        own = [link for link in cluster.links if device.name in link.ends]
        if own and all(link.is_bus or link.duplex == "half" for link in own):
            receive[index] = send[index]
    return send, receive
