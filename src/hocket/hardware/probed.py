"""Infer a cluster from rates measured between ranks.

Two measurements distinguish dedicated links from shared ones: each pair alone, and all pairs at
once. A pair that keeps its rate when all send has a link to itself; the others share what their
ranks' ports let through, which is a star around one switch. Rates are put into groups of about the
same, and to whole multiples of a unit where they are close to them: the planner packs exactly, and
noise in the third digit would cost it hundreds of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link

BoolArray = BoolArray
SWITCH = "network"
_MEMORY_BYTES = 2**33
"""Of a rank: probing measures links alone."""
_KEEPS = 0.75
"""Of its rate alone that a link of its own keeps when all send."""
_ALIKE = 0.12
_GONE = 0.02
"""Share of the fastest link's rate below which no link is assumed."""
_ONE_WAY = 0.6
"""Directions that differ by more are two links."""


@dataclass(frozen=True, eq=False)
class Rates:
    """Measured bytes per second; [src, dst], 0 where nothing came through."""

    alone_bps: FloatArray
    together_bps: FloatArray
    latency_s: FloatArray

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.alone_bps)

    @property
    def is_connected(self) -> bool:
        """True if every rank reaches every other over pairs with a measured bandwidth above 0."""
        return _connected(np.maximum(self.alone_bps, self.together_bps) > 0)

    def cut_from(self, rank: int) -> list[int]:
        """Ranks between which and this one nothing came through."""
        most = np.maximum(self.alone_bps, self.together_bps)
        silent = (most[rank] == 0) & (most[:, rank] == 0)
        return [other for other in np.flatnonzero(silent).tolist() if other != rank]


def cluster_of(rates: Rates) -> Cluster:
    """The cluster whose devices are the ranks."""
    alone, together = rates.alone_bps, rates.together_bps
    least = _GONE * alone.max(initial=0.0)
    is_there = alone > max(least, 1.0)
    own = is_there & (together >= _KEEPS * alone)
    # A direction that looks shared while the other is not is noise: one cable serves both.
    own |= own.T & is_there
    ports = np.where(is_there & ~own, together, 0.0)
    out_bps, in_bps = ports.sum(axis=1), ports.sum(axis=0)
    rough = [*alone[own], *out_bps[out_bps > 0], *in_bps[in_bps > 0]]
    if not rough:
        raise NoFeasiblePlanError(
            "nothing came through between the ranks", hint="is the network up?"
        )
    known = dict(zip(rough, _snapped(rough), strict=True))
    links = list(_own_links(rates, own, known))
    if not _connected(own):
        # Two ranks with a link of their own reach each other over nothing else; where such links
        # suffice, the shared route is left out instead of being counted twice.
        links += _port_links(rates, is_there & ~own, out_bps, in_bps, known)
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


def _connected(own: BoolArray) -> bool:
    """True if every place reaches every other over these pairs."""
    from scipy.sparse.csgraph import connected_components

    return bool(connected_components(own, connection="strong")[0] == 1)


def _own_links(rates: Rates, own: BoolArray, known: dict[float, float]) -> list[Link]:
    links = []
    for a in range(rates.num_ranks):
        for b in range(a + 1, rates.num_ranks):
            there = known[rates.alone_bps[a, b]] if own[a, b] else 0.0
            back = known[rates.alone_bps[b, a]] if own[b, a] else 0.0
            links += _pair(f"rank{a}", f"rank{b}", there, back, float(rates.latency_s[a, b]))
    return links


def _port_links(
    rates: Rates, shared: BoolArray, out_bps: FloatArray, in_bps: FloatArray,
    known: dict[float, float],
) -> list[Link]:  # fmt: skip
    links = []
    for n in range(rates.num_ranks):
        used = shared[n] | shared[:, n]
        if used.any():
            latency_s = float(np.min(rates.latency_s[n][used])) / 2
            there, back = known.get(out_bps[n], 0.0), known.get(in_bps[n], 0.0)
            links += _pair(f"rank{n}", SWITCH, there, back, latency_s)
    return links


def _pair(a: str, b: str, there_bps: float, back_bps: float, latency_s: float) -> list[Link]:
    """A full-duplex link where both directions are about as fast, else up to two one-way links."""
    if min(there_bps, back_bps) >= _ONE_WAY * max(there_bps, back_bps) > 0:
        rate_bps = min(there_bps, back_bps)
        return [_link(f"{a}-{b}", (a, b), rate_bps, latency_s, "full")]
    return [
        _link(f"{src}-to-{dst}", (src, dst), rate_bps, latency_s, "one-way")
        for src, dst, rate_bps in ((a, b, there_bps), (b, a, back_bps))
        if rate_bps > 0
    ]


def _link(name: str, ends: tuple[str, str], rate_bps: float, latency_s: float, duplex: str) -> Link:
    return Link(name=name, ends=ends, bandwidth_bps=rate_bps, latency_s=latency_s, duplex=duplex)  # type: ignore[arg-type]


def _snapped(rates_bps: Sequence[float]) -> list[float]:
    """Rates by groups of about the same; multiples of the slowest group where close to them."""
    order = np.argsort(rates_bps, kind="stable")
    groups: list[list[int]] = []
    for index in order.tolist():
        first = rates_bps[groups[-1][0]] if groups else 0.0
        if groups and rates_bps[index] <= (1 + 2 * _ALIKE) * first:
            groups[-1].append(index)
        else:
            groups.append([index])
    middle = [float(np.median([rates_bps[index] for index in group])) for group in groups]
    unit = middle[0]
    snapped = list(rates_bps)
    for group, rate_bps in zip(groups, middle, strict=True):
        times = round(rate_bps / unit)
        close = abs(rate_bps / (times * unit) - 1) <= _ALIKE
        value = times * _two_digits(unit) if close else _two_digits(rate_bps)
        for index in group:
            snapped[index] = value
    return snapped


def _two_digits(rate_bps: float) -> float:
    return float(f"{rate_bps:.2g}")
