"""How long collective operations take, by the usual formulas in latency and bandwidth.

Every function takes the bytes that one rank holds or ends with (see each docstring), the number of
ranks n, and latency α and bandwidth β (bytes per second, one direction) of the path between
neighbours; all may be arrays of shapes that broadcast. One rank alone takes no time. Arithmetic of
reductions is left out: it is far quicker than the transfers.
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
    """What each step of a ring over given devices costs."""

    latency_s: float
    """Largest latency between neighbours."""
    bandwidth_bps: float
    """Smallest share of bandwidth that a neighbour gets while all send at once."""


def ring_all_reduce_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """All ranks get the sum of their ``size_bytes``: 2(n-1) steps of size/n, 2(n-1)(α + S/nβ)."""
    return 2 * reduce_scatter_s(size_bytes, num_ranks, latency_s, bandwidth_bps)


def reduce_scatter_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """Of ``size_bytes`` per rank each gets its n-th of the sum, in a ring: (n-1)(α + S/nβ)."""
    size, ranks, latency, bandwidth = _arrays(size_bytes, num_ranks, latency_s, bandwidth_bps)
    return np.asarray((ranks - 1) * (latency + size / ranks / bandwidth))


def all_gather_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """All ranks end with ``size_bytes``, each having held an n-th, in a ring: (n-1)(α + S/nβ)."""
    return reduce_scatter_s(size_bytes, num_ranks, latency_s, bandwidth_bps)


def tree_all_reduce_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """Reduce up and broadcast down one binomial tree, unpipelined: 2⌈log₂ n⌉(α + S/β).

    Beats the ring for small messages, where latency is all that counts.
    """
    return 2 * broadcast_s(size_bytes, num_ranks, latency_s, bandwidth_bps)


def broadcast_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """One rank's ``size_bytes`` to all, in a binomial tree: ⌈log₂ n⌉(α + S/β)."""
    size, ranks, latency, bandwidth = _arrays(size_bytes, num_ranks, latency_s, bandwidth_bps)
    # frexp is exact where log2 may round: ⌈log₂ n⌉ is the number of bits of n - 1.
    rounds = np.frexp(ranks - 1)[1]
    return np.asarray(rounds * (latency + size / bandwidth))


def chain_broadcast_s(
    size_bytes: ArrayLike,
    num_ranks: ArrayLike,
    latency_s: ArrayLike,
    bandwidth_bps: ArrayLike,
    num_chunks: ArrayLike,
) -> Seconds:
    """One rank's ``size_bytes`` along a chain in c chunks: (n-1 + c-1)(α + S/cβ).

    Beats the tree for large messages; the best c is about sqrt((n-2) S / (α β)).
    """
    size, ranks, latency, bandwidth = _arrays(size_bytes, num_ranks, latency_s, bandwidth_bps)
    chunks = np.asarray(num_chunks, dtype=np.float64)
    if np.any(chunks < 1):
        raise UsageError("a broadcast needs at least one chunk")
    step_s = latency + size / chunks / bandwidth
    return np.where(ranks > 1, (ranks + chunks - 2) * step_s, 0.0)


def all_to_all_s(
    size_bytes: ArrayLike, num_ranks: ArrayLike, latency_s: ArrayLike, bandwidth_bps: ArrayLike
) -> Seconds:
    """Each rank sends an n-th of its ``size_bytes`` to each other: (n-1)(α + S/nβ).

    Pairs exchange in n-1 rounds; needs a network where all pairs can talk at once.
    """
    return reduce_scatter_s(size_bytes, num_ranks, latency_s, bandwidth_bps)


def hierarchical_all_reduce_s(
    size_bytes: ArrayLike,
    ranks_per_host: ArrayLike,
    num_hosts: ArrayLike,
    latency_s: tuple[ArrayLike, ArrayLike],
    bandwidth_bps: tuple[ArrayLike, ArrayLike],
) -> Seconds:
    """Reduce-scatter within hosts, ring all-reduce of the parts between, all-gather within.

    ``latency_s`` and ``bandwidth_bps`` are (within a host, between hosts); the bandwidth between
    hosts is what one rank gets while all ranks of its host use the network:
    2(m-1)(α₀ + S/mβ₀) + 2(h-1)(α₁ + (S/m)/hβ₁) for m ranks on each of h hosts.
    """
    inside = ring_all_reduce_s(size_bytes, ranks_per_host, latency_s[0], bandwidth_bps[0])
    part_bytes = np.asarray(size_bytes, dtype=np.float64) / np.asarray(ranks_per_host)
    between = ring_all_reduce_s(part_bytes, num_hosts, latency_s[1], bandwidth_bps[1])
    return inside + between


def ring_path(cluster: Cluster, ranks: Sequence[int]) -> RingPath:
    """Latency and bandwidth of a ring over devices of a cluster, in the order given.

    In each step every rank sends to the next; transfers that cross one channel share it equally.
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
    routes = cluster.routes
    pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    crossed = np.concatenate([routes.path(src, dst) for src, dst in pairs])
    load = np.bincount(crossed, minlength=len(routes.channel_names))
    used = load > 0
    return RingPath(
        latency_s=max(float(routes.latency_s[src, dst]) for src, dst in pairs),
        bandwidth_bps=float(np.min(routes.channel_bandwidth_bps[used] / load[used])),
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
