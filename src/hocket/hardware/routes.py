"""Routes: which links a transfer between two devices crosses, and how fast they are.

A channel is what transfers contend for: one per direction of a full-duplex link, one for a
half-duplex link or a bus. The route of a pair is the path with the least sum of link times for a
reference transfer (Dijkstra over hosts and switches; devices do not forward), ties by fewer links,
then by position in the file. O(devices · links log links).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import InputFileError
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
    path_ptr: LongArray
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
class _Crossing:
    """Crossing one link from one place to another."""

    channel: int
    target: int
    link: Link
    reference_s: float
    """Time of the reference transfer over this link alone."""


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
    for src in range(num):
        paths = _fastest_paths(src, steps, num)
        for dst in range(num):
            path = paths[dst]
            if path is None:
                raise InputFileError(
                    f"no path from {cluster.devices[src].name!r} to {cluster.devices[dst].name!r}",
                    hint="add a link, a host or a switch between them; devices do not forward",
                    where=cluster.name,
                )
            if src != dst:
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


def _channels(cluster: Cluster) -> tuple[list[str], list[float], list[list[_Crossing]]]:
    """Names and bandwidths of the channels, and the steps that leave each place.

    Places are numbered: devices first, in their order, then hosts, then switches.
    """
    places = (*cluster.device_names, *cluster.hosts, *cluster.switches)
    number = {place: index for index, place in enumerate(places)}
    names: list[str] = []
    bandwidth: list[float] = []
    steps: list[list[_Crossing]] = [[] for _ in places]
    for link in cluster.links:
        reference_s = link.latency_s + REFERENCE_BYTES / link.bandwidth_bps
        ends = [number[end] for end in link.ends]
        if link.is_bus or link.duplex == "half":
            names.append(link.name)
            bandwidth.append(link.bandwidth_bps)
            for src in ends:
                steps[src] += [
                    _Crossing(len(names) - 1, dst, link, reference_s) for dst in ends if dst != src
                ]
            continue
        for src, dst in (ends,) if link.duplex == "one-way" else (ends, ends[::-1]):
            names.append(f"{link.name} {places[src]}→{places[dst]}")
            bandwidth.append(link.bandwidth_bps)
            steps[src].append(_Crossing(len(names) - 1, dst, link, reference_s))
    return names, bandwidth, steps


def _fastest_paths(
    start: int, steps: list[list[_Crossing]], num_devices: int
) -> list[list[_Crossing] | None]:
    """Dijkstra from one device to all; None where there is no path.

    Link times are summed although the slowest link alone sets the bandwidth of a route: only sums
    make Dijkstra exact, and they prefer direct links.
    """
    num_places = len(steps)
    reached: list[tuple[int, _Crossing] | None] = [None] * num_places
    done = [False] * num_places
    best = [(np.inf, 0)] * num_places
    best[start] = (0.0, 0)
    counter = 0
    queue: list[tuple[float, int, int, int]] = [(0.0, 0, counter, start)]
    while queue:
        cost, num_links, _, place = heapq.heappop(queue)
        if done[place]:
            continue
        done[place] = True
        if place < num_devices and place != start:
            continue
        for step in steps[place]:
            found = (cost + step.reference_s, num_links + 1)
            if found < best[step.target]:
                best[step.target] = found
                reached[step.target] = (place, step)
                counter += 1
                heapq.heappush(queue, (*found, counter, step.target))
    return [_path_to(dst, start, reached) for dst in range(num_devices)]


def _path_to(
    dst: int, start: int, reached: list[tuple[int, _Crossing] | None]
) -> list[_Crossing] | None:
    path: list[_Crossing] = []
    while dst != start:
        last = reached[dst]
        if last is None:
            return None
        dst, step = last
        path.append(step)
    return path[::-1]


def _queues(cluster: Cluster) -> tuple[IntArray, IntArray]:
    """Queue numbers per device: 2d to send and 2d+1 to receive, or 2d for both."""
    send = 2 * np.arange(cluster.num_devices, dtype=np.int32)
    receive = send + 1
    linked = {end for link in cluster.links for end in link.ends}
    bidirectional = {
        end
        for link in cluster.links
        if not link.is_bus and link.duplex != "half"
        for end in link.ends
    }
    for index, name in enumerate(cluster.device_names):
        if name in linked and name not in bidirectional:
            receive[index] = send[index]
    return send, receive
