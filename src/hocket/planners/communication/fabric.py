"""The links among the devices of one job, as a directed graph with whole capacities.

Ranks come first, then the places that only forward: switches, hosts and, where allowed, devices
that are not in the job. A full-duplex link gives two arcs with a channel each, a half-duplex link
or a bus gives arcs that share one channel. By default only the peer links are used if they connect
the ranks: those between devices, and switches that no host is attached to (NVLink, xGMI, NVSwitch),
since a pair of devices that uses them does not use PCIe at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Literal

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.errors import NoFeasiblePlanError, UsageError, did_you_mean
from hocket.hardware.cluster import Cluster, Link

LinkChoice = Literal["auto", "peer", "host", "all"]
LINK_CHOICES: tuple[LinkChoice, ...] = ("auto", "peer", "host", "all")
MAX_RANKS = 128
"""Most ranks for which a full schedule is planned; bounds are computed for more."""


@dataclass(frozen=True)
class Arc:
    """One direction of a link between two places."""

    tail: int
    head: int
    channel: int
    link: str
    latency_s: float


@dataclass(frozen=True, eq=False)
class Fabric:
    """Links that the ranks can send over; capacities in units of ``unit_bps``."""

    places: tuple[str, ...]
    """Names of places; the first ``num_ranks`` are the devices of the job."""
    num_ranks: int
    arcs: tuple[Arc, ...]
    capacity: tuple[int, ...]
    """Capacity of each channel, in units."""
    unit_bps: int
    is_peer_only: bool
    """True if links of the hosts were left out."""

    @property
    def num_places(self) -> int:
        """Number of ranks and of places that only forward."""
        return len(self.places)

    @cached_property
    def matrix(self) -> LongArray:
        """Capacity in units by [tail, head], parallel links added up."""
        units = np.zeros((self.num_places, self.num_places), dtype=np.int64)
        for arc in self.arcs:
            units[arc.tail, arc.head] += self.capacity[arc.channel]
        return units

    @cached_property
    def has_shared_channels(self) -> bool:
        """True if some arcs share one channel (half duplex, buses)."""
        return len(self.arcs) != len(self.capacity)

    @cached_property
    def is_symmetric(self) -> bool:
        """True if every link is full duplex: two arcs with a channel of the same rate each."""
        return not self.has_shared_channels and all(
            back >= 0 and self.capacity[self.arcs[back].channel] == self.capacity[arc.channel]
            for arc, back in zip(self.arcs, self.opposite, strict=True)
        )

    @cached_property
    def opposite(self) -> tuple[int, ...]:
        """For each arc the reverse arc of the same link; -1 if there is none."""
        number = {(arc.link, arc.tail, arc.head): index for index, arc in enumerate(self.arcs)}
        return tuple(number.get((arc.link, arc.head, arc.tail), -1) for arc in self.arcs)

    def reversed(self) -> Fabric:
        """The fabric with every arc in the other direction, in the same order."""
        arcs = tuple(replace(arc, tail=arc.head, head=arc.tail) for arc in self.arcs)
        return replace(self, arcs=arcs)

    @property
    def has_switches(self) -> bool:
        """True if some places only forward."""
        return self.num_places > self.num_ranks


def fabric_of(
    cluster: Cluster, ranks: Sequence[str], *, relay: bool = False, links: LinkChoice = "auto"
) -> Fabric:
    """Return the fabric among devices of a cluster; other devices forward only with ``relay``."""
    used = _usable(cluster, ranks, relay)
    peer = _peer_links(cluster, used)
    chosen, is_peer_only = used, False
    if links == "peer" or (links == "auto" and _connected(peer, ranks)):
        chosen, is_peer_only = peer, len(peer) < len(used)
    elif links == "host":
        chosen = [link for link in used if link not in peer]
    if not (_connected(chosen, ranks) and _connected(chosen, ranks, backwards=True)):
        raise NoFeasiblePlanError(
            f"{', '.join(ranks)} are not connected by the links that may be used",
            hint="allow all links (--links all), relays (--relay), or choose other devices",
            where=cluster.name,
        )
    return _build(_needed(chosen, ranks), ranks, is_peer_only)


def chosen_ranks(cluster: Cluster, text: str | None) -> tuple[str, ...]:
    """Return the devices of ``0,1,2,4``, ``0-3``, ``gpu0,gpu5`` or ``host0.gpu1``; None means
    all."""
    if text is None:
        if cluster.num_devices < 2:
            raise UsageError("a collective needs two devices or more", where=cluster.name)
        return cluster.device_names
    names: list[str] = []
    for part in text.split(","):
        names += _device_names(cluster, part.strip())
    if len(set(names)) != len(names):
        raise UsageError(f"--gpus {text!r} names a device twice", hint="name each device once")
    if len(names) < 2:
        raise UsageError("a collective needs two devices or more", hint="write --gpus 0,1,2,3")
    return tuple(names)


def chosen_device(cluster: Cluster, text: str) -> str:
    """Return the only device that a number or a name refers to."""
    names = list(_device_names(cluster, text.strip()))
    if len(names) != 1:
        raise UsageError(f"{text!r} names several devices", hint="name one")
    return names[0]


def _device_names(cluster: Cluster, part: str) -> Iterable[str]:
    first, dash, last = part.partition("-")
    if part in cluster.device_names:
        return (part,)
    # The length limit keeps huge numbers out of the range below.
    if first.isdecimal() and (not dash or last.isdecimal()) and len(part) < 20:
        start, stop = int(first), int(last or first) + 1
        if start < stop <= cluster.num_devices:
            return cluster.device_names[start:stop]
        raise UsageError(
            f"no device has the number {part}",
            hint=f"numbers go from 0 to {cluster.num_devices - 1}",
            where=cluster.name,
        )
    # Only the first names are compared: spelling hints over a huge cluster would take long.
    hint = did_you_mean(part, cluster.device_names[:2000])
    raise UsageError(f"unknown device {part[:100]!r}", hint=hint, where=cluster.name)


def _usable(cluster: Cluster, ranks: Sequence[str], relay: bool) -> list[Link]:
    """Return links without the devices that may not be used; a bus keeps its other ends."""
    gone = set() if relay else set(cluster.device_names).difference(ranks)
    kept = []
    for link in cluster.links:
        ends = tuple(end for end in link.ends if end not in gone)
        if len(ends) >= 2:
            kept.append(link if ends == link.ends else _with_ends(link, ends))
    return kept


def _with_ends(link: Link, ends: tuple[str, ...]) -> Link:
    # A bus with two ends left is still one channel for both directions.
    return Link(
        name=link.name, ends=ends, bandwidth_bps=link.bandwidth_bps, latency_s=link.latency_s,
        duplex="half" if link.is_bus else link.duplex,
    )  # fmt: skip


def _peer_links(cluster: Cluster, links: Sequence[Link]) -> list[Link]:
    """Return links between devices, and those of switches from which no host can be reached."""
    devices = set(cluster.device_names)
    near: dict[str, set[str]] = defaultdict(set)
    for link in links:
        between = [end for end in link.ends if end not in devices]
        for place in between:
            near[place].update(between)
    reached = _reached(near, cluster.hosts)
    return [link for link in links if reached.isdisjoint(link.ends)]


def _reached(near: Mapping[str, Collection[str]], starts: Iterable[str]) -> set[str]:
    """Places that can be reached from some places over their neighbours."""
    reached = set(starts)
    stack = list(reached)
    while stack:
        fresh = set(near.get(stack.pop(), ())) - reached
        reached |= fresh
        stack += fresh
    return reached


def _connected(links: Sequence[Link], ranks: Sequence[str], *, backwards: bool = False) -> bool:
    """True if the first rank reaches all others; with ``backwards``, if all others reach it."""
    near: dict[str, set[str]] = defaultdict(set)
    for link in links:
        for end in link.ends:
            if link.duplex != "one-way" or end == link.ends[-1 if backwards else 0]:
                near[end].update(link.ends)
    return _reached(near, ranks[:1]).issuperset(ranks)


def _needed(links: list[Link], ranks: Sequence[str]) -> list[Link]:
    """Remove dead ends repeatedly: places with only one link that are not ranks."""
    # Removing a dead end can make its neighbour one.
    while True:
        count: dict[str, int] = defaultdict(int)
        for link in links:
            for end in link.ends:
                count[end] += 1
        ends = {place for place, number in count.items() if number == 1} - set(ranks)
        # A bus with one end less is still a bus for its other ends.
        kept = [link for link in links if link.is_bus or ends.isdisjoint(link.ends)]
        if len(kept) == len(links):
            return links
        links = kept


def _build(links: Sequence[Link], ranks: Sequence[str], is_peer_only: bool) -> Fabric:
    inner = dict.fromkeys(end for link in links for end in link.ends)
    places = (*ranks, *(place for place in inner if place not in set(ranks)))
    number = {place: index for index, place in enumerate(places)}
    arcs: list[Arc] = []
    rates: list[int] = []
    for link in links:
        # Rates below a byte per second are implausible; whole bytes keep every sum exact.
        rate = max(1, round(link.bandwidth_bps))
        is_shared = link.is_shared
        if is_shared:
            rates.append(rate)
        for src in link.ends:
            for dst in link.ends:
                if src == dst or (link.duplex == "one-way" and src != link.ends[0]):
                    continue
                if not is_shared:
                    rates.append(rate)
                arcs.append(
                    Arc(number[src], number[dst], len(rates) - 1, link.name, link.latency_s)
                )
    # A common unit keeps capacities small, so that flows stay within 64 bits.
    unit = gcd(*rates)
    capacity = tuple(rate // unit for rate in rates)
    return Fabric(places, len(ranks), tuple(arcs), capacity, unit, is_peer_only)
