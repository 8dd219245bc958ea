"""Time of a ring all-reduce on given links, by the latency-bandwidth model.

Bytes per rank, number of ranks n, latency α and bandwidth β (bytes per second, one direction) of
the path between neighbours may be arrays that broadcast. A single rank takes no time. The
arithmetic of the reduction is ignored: it is far faster than the transfers. Transformers have a
separate model that is fitted to measured runs (`cost.parallel.traffic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class RingPath:
    """Latency and bandwidth of one ring step over given devices, or of several rings at once."""

    latency_s: float
    """Largest latency between neighbours."""
    bandwidth_bps: float
    """Smallest bandwidth of any neighbour pair, over all rings, while all ranks send at once."""


def ring_all_reduce_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """Time of a ring all-reduce of ``size_bytes``: 2(n-1) steps of size/n, 2(n-1)(α + S/nβ)."""
    size, ranks, latency, bandwidth = _arrays(size_bytes, num_ranks, latency_s, bandwidth_bps)
    return np.asarray(2 * (ranks - 1) * (latency + size / ranks / bandwidth))


def ring_path(cluster: Cluster, ranks: Sequence[int]) -> RingPath:
    """Latency and bandwidth of a ring over devices of a cluster, in the given order.

    In each step every rank sends to the next; transfers over one channel share it equally.
    """
    if len(set(ranks)) != len(ranks) or len(ranks) < 2:
        raise UsageError(
            f"a ring needs two or more different devices, not {list(ranks)[:20]}",
            hint="name each device once",
        )
    wrong = next((rank for rank in ranks if not 0 <= rank < cluster.num_devices), None)
    if wrong is not None:
        raise UsageError(
            f"device {wrong} is not in {cluster.name!r}",
            hint=f"devices are numbered 0 to {cluster.num_devices - 1}",
        )
    return _rings_path(cluster, [ranks])


def rails_path(cluster: Cluster, ranks: Sequence[int]) -> RingPath:
    """Latency and bandwidth of simultaneous rings, one per rank of a host.

    One ring enters and leaves a host through one network adapter each. Rings through the ranks of
    each host in rotated order use all adapters, as NCCL's channels do, and share the links inside
    the host. Falls back to one ring if hosts have one rank or unequal numbers of ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(cluster.devices[rank].host, []).append(rank)
    counts = {len(own) for own in by_host.values()}
    one = ring_path(cluster, ranks)
    if len(by_host) < 2 or len(counts) != 1 or counts == {1}:
        return one
    rings = [
        [rank for own in by_host.values() for rank in (*own[first:], *own[:first])]
        for first in range(counts.pop())
    ]
    return max(one, _rings_path(cluster, rings), key=lambda path: path.bandwidth_bps)


def _rings_path(cluster: Cluster, rings: Sequence[Sequence[int]]) -> RingPath:
    """Latency and bandwidth of rings that each move an equal part of the bytes at the same time."""
    routes = cluster.routes
    pairs = [pair for ring in rings for pair in zip(ring, [*ring[1:], ring[0]], strict=True)]
    crossed = np.concatenate([routes.path(src, dst) for src, dst in pairs])
    load = np.bincount(crossed, minlength=len(routes.channel_names))
    used = load > 0
    share_bps = float(np.min(routes.channel_bandwidth_bps[used] / load[used]))
    return RingPath(
        latency_s=max(float(routes.latency_s[src, dst]) for src, dst in pairs),
        bandwidth_bps=len(rings) * share_bps,
    )


def _arrays(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> tuple[Seconds, Seconds, Seconds, Seconds]:
    size, ranks, latency, bandwidth = (
        np.asarray(value, dtype=np.float64)
        for value in (size_bytes, num_ranks, latency_s, bandwidth_bps)
    )
    if np.any(ranks < 1) or np.any(size < 0) or np.any(latency < 0) or np.any(bandwidth <= 0):
        raise UsageError(
            "a collective needs at least one rank, no negative size or latency, and bandwidth"
        )
    return size, ranks, latency, bandwidth
