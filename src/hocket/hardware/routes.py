"""Routes: the links that a transfer between two devices crosses, and their bandwidth.

Transfers contend for channels: a full-duplex link has one per direction, a half-duplex link or a
bus has one. A transfer takes the path with the smallest sum of link times for a reference size
(Dijkstra over hosts and switches; devices do not forward). Ties go to fewer links, then to the
order of the links in the file. O(devices · links log links).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import InputFileError
from hocket.hardware.cluster import Cluster, Link

REFERENCE_BYTES = 16 * 2**20
"""Size of the transfer for which routes are the fastest: a typical activation."""
MAX_DEVICES = 1024
"""Largest number of devices with all-pairs routes; more would take gigabytes."""


class Crossing(NamedTuple):
    """A link in the direction from one place to another."""

    channel: int
    target: int
    link: Link
    reference_s: float
    """Time of the reference transfer over this link alone."""


class Wiring:
    """Links of a cluster by place, and the fastest paths over them.

    Places are numbered: devices first, in their order, then hosts, then switches.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.places = (*cluster.device_names, *cluster.hosts, *cluster.switches)
        self.number = {place: index for index, place in enumerate(self.places)}
        self.channel_names: list[str] = []
        self.channel_bandwidth_bps: list[float] = []
        self._links: list[list[tuple[int, Link]]] = [[] for _ in self.places]
        self._crossings: dict[int, list[Crossing]] = {}
        for link in cluster.links:
            for end in link.ends:
                self._links[self.number[end]].append((len(self.channel_names), link))
            names = [link.name]
            if not link.is_shared:
                src, dst = link.ends
                names = [f"{link.name} {src}→{dst}", f"{link.name} {dst}→{src}"]
            names = names[:1] if link.duplex == "one-way" else names
            self.channel_names += names
            self.channel_bandwidth_bps += [link.bandwidth_bps] * len(names)

    def crossings(self, place: int) -> list[Crossing]:
        """Links that leave a place, each with its direction, in the order of the links."""
        if place not in self._crossings:
            self._crossings[place] = [
                Crossing(
                    # A full-duplex link has two channels; the second is the direction towards the
                    # first end.
                    channel + (not link.is_shared and self.number[link.ends[0]] != place),
                    self.number[end],
                    link,
                    link.latency_s + REFERENCE_BYTES / link.bandwidth_bps,
                )
                for channel, link in self._links[place]
                for end in (link.ends[1:] if link.duplex == "one-way" else link.ends)
                if self.number[end] != place
            ]
        return self._crossings[place]

    def fastest_paths(
        self, src: int, stop: int | None = None, is_open: Callable[[int], bool] = lambda place: True
    ) -> list[tuple[int, Crossing] | None]:
        """Previous place and last crossing of the fastest path to each place (Dijkstra).

        Stops when the path to ``stop`` is known, and enters only places for which ``is_open`` is
        true. Link times are summed although the slowest link alone sets the bandwidth of a route:
        only sums make Dijkstra exact, and they prefer direct links.
        """
        num_devices = self._cluster.num_devices
        reached: list[tuple[int, Crossing] | None] = [None] * len(self.places)
        best = {src: (0.0, 0)}
        done: set[int] = set()
        # The counter keeps equal entries in insertion order, so that ties go to the first link in
        # the file.
        counter = 0
        queue = [(0.0, 0, counter, src)]
        while queue:
            cost_s, num_links, _, place = heapq.heappop(queue)
            if place == stop:
                break
            # Devices other than the source do not forward traffic.
            if place in done or (place < num_devices and place != src):
                continue
            done.add(place)
            for crossing in self.crossings(place):
                target, found = crossing.target, (cost_s + crossing.reference_s, num_links + 1)
                if found < best.get(target, (np.inf, 0)) and is_open(target):
                    best[target] = found
                    reached[target] = (place, crossing)
                    counter += 1
                    heapq.heappush(queue, (*found, counter, target))
        return reached

    def path_to(
        self, dst: int, src: int, reached: list[tuple[int, Crossing] | None]
    ) -> list[Crossing]:
        """Crossings from ``src`` to ``dst``; raises `InputFileError` if there is no path."""
        path: list[Crossing] = []
        at = dst
        while at != src:
            last = reached[at]
            if last is None:
                raise InputFileError(
                    f"no path from {self.places[src]!r} to {self.places[dst]!r}",
                    hint="add a link, a host or a switch between them; devices do not forward",
                    where=self._cluster.name,
                )
            at, crossing = last
            path.append(crossing)
        return path[::-1]


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
    """Queue of each device that its outgoing transfers share if transfers are queued."""
    receive_queue: IntArray
    """Queue of each device for incoming transfers; equal to `send_queue` behind half-duplex links.
    """

    def path(self, src: int, dst: int) -> IntArray:
        """Channels that a transfer from ``src`` to ``dst`` crosses, in order."""
        pair = src * len(self.send_queue) + dst
        return self.path_channels[self.path_ptr[pair] : self.path_ptr[pair + 1]]


def find_routes(cluster: Cluster) -> Routes:
    """Routes between all pairs of devices; raises `InputFileError` for an unreachable pair."""
    num = cluster.num_devices
    if num > MAX_DEVICES:
        raise InputFileError(
            f"cluster {cluster.name!r} has {num} devices; op placement handles {MAX_DEVICES}",
            hint="plan for one replica of the model",
        )
    wiring = cluster.wiring
    latency = np.zeros((num, num))
    bandwidth = np.full((num, num), np.inf)
    hops = np.zeros((num, num), dtype=np.int32)
    ptr, flat = [0], list[int]()
    for src in range(num):
        reached = wiring.fastest_paths(src)
        for dst in range(num):
            path = wiring.path_to(dst, src, reached)
            if path:
                latency[src, dst] = sum(step.link.latency_s for step in path)
                bandwidth[src, dst] = min(step.link.bandwidth_bps for step in path)
                hops[src, dst] = len(path)
                flat.extend(step.channel for step in path)
            ptr.append(len(flat))
    send, receive = _queues(cluster)
    return Routes(
        channel_names=tuple(wiring.channel_names),
        channel_bandwidth_bps=np.array(wiring.channel_bandwidth_bps, dtype=np.float64),
        latency_s=latency,
        bandwidth_bps=bandwidth,
        hops=hops,
        path_ptr=np.array(ptr, dtype=np.int64),
        path_channels=np.array(flat, dtype=np.int32),
        send_queue=send,
        receive_queue=receive,
    )


def _queues(cluster: Cluster) -> tuple[IntArray, IntArray]:
    """Queue numbers per device: 2d to send and 2d+1 to receive, or 2d for both."""
    send = 2 * np.arange(cluster.num_devices, dtype=np.int32)
    receive = send + 1
    linked = {end for link in cluster.links for end in link.ends}
    bidirectional = {end for link in cluster.links if not link.is_shared for end in link.ends}
    for index, name in enumerate(cluster.device_names):
        if name in linked and name not in bidirectional:
            receive[index] = send[index]
    return send, receive
