"""Time of a ring all-reduce on given links, by the latency-bandwidth model.

Sizes, numbers of ranks, latencies and bandwidths may be arrays that broadcast. The arithmetic of
the reduction is ignored, because it is far faster than the transfers. Transformers have a separate
model that is fitted to measured runs (`cost.parallel.traffic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """Time of a ring all-reduce: 2(n-1) steps of size/n bytes each; 0 for a single rank."""
    ranks, bandwidth = np.asarray(num_ranks), np.asarray(bandwidth_bps)
    step_s = latency_s + np.asarray(size_bytes) / ranks / bandwidth
    return np.asarray(2 * (ranks - 1) * step_s, np.float64)


def ring_path(cluster: Cluster, ranks: Sequence[int]) -> RingPath:
    """Latency and bandwidth of a ring over devices of a cluster, in the given order.

    In each step every rank sends to the next; transfers over one channel share it equally.
    """
    return _rings_path(cluster, [ranks])


def rails_path(cluster: Cluster, ranks: Sequence[int]) -> RingPath:
    """Latency and bandwidth of simultaneous rings, one per rank of a host.

    A single ring enters and leaves each host through one network adapter. Several rings, each
    through the ranks of the hosts in another rotation, use all adapters, as NCCL's channels do, and
    share the links inside the hosts. With one rank per host or unequal numbers of ranks there is
    one ring.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(cluster.devices[rank].host, []).append(rank)
    counts = {len(own) for own in by_host.values()}
    one = ring_path(cluster, ranks)
    if len(by_host) < 2 or len(counts) != 1 or counts == {1}:
        # Unequal hosts cannot be rotated against each other.
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
    # Each channel is shared by the transfers that cross it in the same step.
    share_bps = float(np.min(routes.channel_bandwidth_bps[used] / load[used]))
    return RingPath(
        latency_s=max(float(routes.latency_s[src, dst]) for src, dst in pairs),
        bandwidth_bps=len(rings) * share_bps,
    )
