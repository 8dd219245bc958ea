"""Infer a cluster from bandwidths measured between ranks.

Two measurements distinguish dedicated links from shared ones: each pair alone, and all pairs at
once. A pair that keeps its bandwidth when all pairs send has a dedicated link. All other pairs
share the ports of their ranks, which form a star around one switch. Bandwidths are rounded to
groups and, if they are close, to whole multiples of the slowest group. The planner packs trees
exactly, so noise in the third digit would cost it hundreds of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link

SWITCH = "network"
_MEMORY_BYTES = 2**33
"""Assumed memory of a rank; only links are measured."""
_DEDICATED = 0.75
"""Fraction of its exclusive bandwidth that a dedicated link retains when all pairs send."""
_CLOSE = 0.12
"""Relative difference below which bandwidths count as equal."""
_ABSENT = 0.02
"""Fraction of the fastest link's bandwidth below which a link counts as absent."""
_SYMMETRIC = 0.6
"""Smallest ratio of the two directions of a full-duplex link."""


@dataclass(frozen=True, eq=False)
class Rates:
    """Measured bytes per second at [src, dst]; 0 if no data arrived."""

    alone_bps: FloatArray
    together_bps: FloatArray
    latency_s: FloatArray

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.alone_bps)

    @property
    def is_connected(self) -> bool:
        """True if every rank reaches every other over pairs with a bandwidth above 0."""
        return _are_connected(np.maximum(self.alone_bps, self.together_bps) > 0)

    def cut_from(self, rank: int) -> list[int]:
        """Other ranks that exchanged no data with this rank."""
        best_bps = np.maximum(self.alone_bps, self.together_bps)
        silent = (best_bps[rank] == 0) & (best_bps[:, rank] == 0)
        return [other for other in np.flatnonzero(silent).tolist() if other != rank]


def cluster_of(rates: Rates) -> Cluster:
    """The cluster whose devices are the ranks."""
    alone, together = rates.alone_bps, rates.together_bps
    is_linked = alone > max(_ABSENT * alone.max(initial=0.0), 1.0)
    dedicated = is_linked & (together >= _DEDICATED * alone)
    # A link that looks shared in one direction only is noise, because one cable serves both
    # directions.
    dedicated |= dedicated.T & is_linked
    shared = is_linked & ~dedicated
    ports = np.where(shared, together, 0.0)
    out_bps, in_bps = ports.sum(axis=1), ports.sum(axis=0)
    measured = [*alone[dedicated], *out_bps[out_bps > 0], *in_bps[in_bps > 0]]
    if not measured:
        raise NoFeasiblePlanError("no data arrived between the ranks", hint="is the network up?")
    rounded = dict(zip(measured, _rounded(measured), strict=True))
    links = _dedicated_links(rates, dedicated, rounded)
    # If dedicated links connect all ranks, a shared switch would count the same cables twice.
    if not _are_connected(dedicated):
        links += _port_links(rates, shared, out_bps, in_bps, rounded)
    kind = DeviceKind(
        name="rank", memory_bytes=_MEMORY_BYTES, peak_flops={"float32": 1e11}, is_cpu=True,
        memory_bandwidth_bps=1e10, source="links measured by hocket probe; the rest is not",
    )  # fmt: skip
    devices = tuple(
        Device(name=f"rank{n}", kind=kind, host=f"host{n}", memory_bytes=_MEMORY_BYTES)
        for n in range(rates.num_ranks)
    )
    switches = (SWITCH,) if any(SWITCH in link.ends for link in links) else ()
    return Cluster(
        name="probed", devices=devices, hosts=tuple(d.host for d in devices), switches=switches,
        links=tuple(links),
    )  # fmt: skip


def _are_connected(pairs: BoolArray) -> bool:
    """True if every rank reaches every other over these pairs."""
    from scipy.sparse.csgraph import connected_components

    return bool(connected_components(pairs, connection="strong")[0] == 1)


def _dedicated_links(rates: Rates, dedicated: BoolArray, rounded: dict[float, float]) -> list[Link]:
    links = []
    for a in range(rates.num_ranks):
        for b in range(a + 1, rates.num_ranks):
            there, back = (
                rounded[rates.alone_bps[pair]] if dedicated[pair] else 0.0
                for pair in ((a, b), (b, a))
            )
            links += _links(f"rank{a}", f"rank{b}", there, back, float(rates.latency_s[a, b]))
    return links


def _port_links(
    rates: Rates, shared: BoolArray, out_bps: FloatArray, in_bps: FloatArray,
    rounded: dict[float, float],
) -> list[Link]:  # fmt: skip
    links = []
    for n in range(rates.num_ranks):
        used = shared[n] | shared[:, n]
        if used.any():
            # The latency of a pair is the sum of two ports.
            latency_s = float(np.min(rates.latency_s[n][used])) / 2
            there, back = rounded.get(out_bps[n], 0.0), rounded.get(in_bps[n], 0.0)
            links += _links(f"rank{n}", SWITCH, there, back, latency_s)
    return links


def _links(a: str, b: str, there_bps: float, back_bps: float, latency_s: float) -> list[Link]:
    """A full-duplex link if both directions are about equal, else up to two one-way links."""
    slower, faster = sorted((there_bps, back_bps))
    if slower >= _SYMMETRIC * faster > 0:
        return [Link(name=f"{a}-{b}", ends=(a, b), bandwidth_bps=slower, latency_s=latency_s)]
    return [
        Link(
            name=f"{src}-to-{dst}", ends=(src, dst), bandwidth_bps=rate_bps, latency_s=latency_s,
            duplex="one-way",
        )
        for src, dst, rate_bps in ((a, b, there_bps), (b, a, back_bps))
        if rate_bps > 0
    ]  # fmt: skip


def _rounded(rates_bps: Sequence[float]) -> list[float]:
    """Round bandwidths to the median of their group, and groups to multiples of the slowest one if
    close.
    """
    ascending = np.sort(rates_bps)
    starts = [0]
    for index, rate_bps in enumerate(ascending):
        # Noise is at most `_CLOSE` in both directions, hence twice that within a group.
        if rate_bps > (1 + 2 * _CLOSE) * ascending[starts[-1]]:
            starts.append(index)
    medians = [float(np.median(group)) for group in np.split(ascending, starts[1:])]
    unit = medians[0]
    rounded = []
    for median in medians:
        times = round(median / unit)
        is_multiple = abs(median / (times * unit) - 1) <= _CLOSE
        rounded.append(times * _two_digits(unit) if is_multiple else _two_digits(median))
    group = np.searchsorted(ascending[starts], rates_bps, side="right") - 1
    return [rounded[index] for index in group]


def _two_digits(rate_bps: float) -> float:
    return float(f"{rate_bps:.2g}")
