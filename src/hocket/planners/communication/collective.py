"""A collective planned: the bound, the best schedule, the plain ones, and which to use for a size.

Packing is done once per class of topologies: on the canonical form of the fabric, whose trees are
then given the names of the actual devices and links. Of all offers the one with the least simulated
time is chosen, or, where no size is given, the one with the largest rate; equals go to the one with
fewer trees, so the plan is never slower than a baseline that was considered.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import log

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Collective, Communication, Send, Tree
from hocket.planners.communication import chains
from hocket.planners.communication.arborescence import cheapest_arborescence
from hocket.planners.communication.certificate import Certificate, LinkCut, Partition
from hocket.planners.communication.classes import canonical_form, renamed
from hocket.planners.communication.cuts import best_root
from hocket.planners.communication.exchange import shortest_exchange
from hocket.planners.communication.fabric import MAX_RANKS, Fabric, LinkChoice, fabric_of
from hocket.planners.communication.paths import CheapestPaths, Path
from hocket.planners.communication.schedule import Scheduled, best_schedule
from hocket.planners.communication.sends import (
    RoutedTree,
    both_directions,
    one_direction,
    section_of,
)
from hocket.simulate.collective import CollectiveTimes

# Trees as Blink packs them, for comparison: multiplicative weights, then few whole trees.
#
# Wang et al., MLSys 2020, after Garg and Könemann (1998): every link has a length that grows with
# its load; the shortest tree takes as much as its narrowest link allows, until the lengths
# add up to 1. Scaled down, the flow is within a few epsilon of the optimum, spread over many trees.
# Then an integer program over those trees takes whole units of them. O(links log links / epsilon²)
# trees.

Edges = tuple[tuple[int, int, Path], ...]


def many_trees(fabric: Fabric, root: int, *, epsilon: float = 0.1) -> dict[Edges, float]:
    """Weights of the trees that a broadcast from the root is spread over, in units."""
    count = len(fabric.capacity)
    start = (1 + epsilon) * ((1 + epsilon) * count) ** (-1 / epsilon)
    length = [start / units for units in fabric.capacity]
    weights: dict[Edges, float] = defaultdict(float)
    while sum(y * c for y, c in zip(length, fabric.capacity, strict=True)) < 1:
        edges = _shortest_tree(fabric, root, length)
        usage: dict[int, int] = defaultdict(int)
        for _, _, path in edges:
            for arc in path:
                usage[fabric.arcs[arc].channel] += 1
        flow = min(fabric.capacity[channel] / times for channel, times in usage.items())
        for channel, times in usage.items():
            length[channel] *= 1 + epsilon * flow * times / fabric.capacity[channel]
        weights[edges] += flow
    scale = log((1 + epsilon) / start) / log(1 + epsilon)
    return {edges: weight / scale for edges, weight in weights.items()}


def _shortest_tree(fabric: Fabric, root: int, length: list[float]) -> Edges:
    paths = CheapestPaths(fabric, [length[arc.channel] for arc in fabric.arcs])
    count = fabric.num_ranks
    parent = cheapest_arborescence([row[:count] for row in paths.cost[:count]], root)
    return tuple((a, b, paths.path(a, b)) for b, a in enumerate(parent) if a >= 0)


def blink(
    fabric: Fabric, collective: Collective, root: int, *, epsilon: float = 0.1
) -> Communication | None:
    """Whole units of the trees that multiplicative weights find; None where Blink has no trees.

    An all-reduce sends over each tree towards the root and away from it.
    """
    if collective not in ("broadcast", "reduce", "allreduce") or not fabric.is_symmetric:
        return None
    is_reduce = collective == "reduce"
    shown = fabric.turned_around() if is_reduce else fabric
    chosen = _whole_trees(shown, list(many_trees(shown, root, epsilon=epsilon)))
    routed = [RoutedTree(Fraction(weight), root, edges) for edges, weight in chosen]
    if collective == "allreduce":
        trees = [both_directions(fabric, tree) for tree in routed]
    else:
        trees = [one_direction(fabric, tree, is_reduce=is_reduce) for tree in routed]
    return section_of(fabric, collective, root, "blink", trees)


def _whole_trees(fabric: Fabric, trees: list[Edges]) -> list[tuple[Edges, int]]:
    """Whole units of each tree, the most in all (integer program, HiGHS); one where none fits."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    load = np.zeros((len(fabric.capacity), len(trees)))
    for column, edges in enumerate(trees):
        for _, _, path in edges:
            for arc in path:
                load[fabric.arcs[arc].channel, column] += 1
    capacity = np.array(fabric.capacity, dtype=float)
    ones = np.ones(len(trees))
    options = {"time_limit": 10.0}
    most = milp(
        -ones, integrality=ones, bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(load, ub=capacity), options=options,
    )  # fmt: skip
    if most.x is None or -most.fun < 1:
        return [(trees[0], 1)]
    return [
        (edges, round(units)) for edges, units in zip(trees, most.x, strict=True) if units > 0.5
    ]


_MAX_KEPT = 256
_planned: dict[tuple[object, ...], Scheduled] = {}
_LARGE_BYTES = 2**30
"""Size for which offers are compared where their rates are equal and none was given."""


@dataclass(frozen=True, eq=False)
class Offer:
    """One candidate schedule of the collective, with its rate and times."""

    section: Communication
    rate_bps: Fraction
    times: CollectiveTimes

    @property
    def name(self) -> str:
        """The algorithm."""
        return self.section.algorithm

    @property
    def latency_s(self) -> float:
        """Time of an empty message."""
        return self.times.longest_s


@dataclass(frozen=True, eq=False)
class CollectivePlan:
    """Bound, candidates and chosen schedule of one collective on some devices."""

    cluster: Cluster
    fabric: Fabric
    collective: Collective
    root: int
    size_bytes: int | None
    bound_bps: Fraction
    certificate: Certificate
    offers: tuple[Offer, ...]
    """The packed trees first, then the plain ones."""
    chosen: Offer
    plan_s: float
    """CPU time of bound and packing."""

    @property
    def gap(self) -> float:
        """Relative distance of the chosen rate from the bound."""
        return float(1 - self.chosen.rate_bps / self.bound_bps)


def plan_collective(
    cluster: Cluster,
    collective: Collective,
    ranks: Sequence[str],
    *,
    root: str | None = None,
    size_bytes: int | None = None,
    relay: bool = False,
    links: LinkChoice = "auto",
    max_trees: int | None = None,
    with_blink: bool = False,
) -> CollectivePlan:
    """Bound, offers and choice; without a root the one from which the collective is fastest.

    ``with_blink`` the trees of multiplicative weights are offered too, which takes seconds.
    """
    if len(ranks) > MAX_RANKS:
        raise NoFeasiblePlanError(
            f"{len(ranks)} ranks are more than the {MAX_RANKS} that schedules are planned for",
            hint="ask for the bound alone (--bound), or for fewer devices (--gpus)",
            where=cluster.name,
        )
    fabric = fabric_of(cluster, ranks, relay=relay, links=links)
    start_s = time.process_time()
    at = _root(fabric, collective, root)
    planned = planned_once(fabric, collective, at, max_trees)
    plan_s = time.process_time() - start_s
    found = [planned.section, *_plain(cluster, fabric, collective, at, relay)]
    known = blink(fabric, collective, at) if with_blink else None
    found += [known] if known is not None else []
    offers = tuple(_offer(section, cluster) for section in found)
    chosen = _choose(offers, size_bytes)
    size = size_bytes if size_bytes is not None else _LARGE_BYTES
    section = replace(chosen.section, num_chunks=chosen.times.num_chunks(size))
    return CollectivePlan(
        cluster=cluster,
        fabric=fabric,
        collective=collective,
        root=at,
        size_bytes=size_bytes,
        bound_bps=planned.certificate.bound * fabric.unit_bps,
        certificate=planned.certificate,
        offers=offers,
        chosen=replace(chosen, section=section),
        plan_s=plan_s,
    )


def planned_once(
    fabric: Fabric, collective: Collective, root: int, max_trees: int | None = None
) -> Scheduled:
    """`best_schedule`, found once for all fabrics of a class."""
    has_root = collective in ("broadcast", "reduce")
    form = canonical_form(fabric, root if has_root else None)
    plain, places, links = renamed(fabric, form)
    # The root is the first place of the form, where there is one.
    key = (form.key, collective, max_trees)
    if key not in _planned:
        if len(_planned) >= _MAX_KEPT:
            _planned.clear()
        _planned[key] = best_schedule(plain, collective, 0, max_trees=max_trees)
    named = _named(_planned[key], plain, fabric, places, links)
    return replace(named, section=replace(named.section, root=fabric.places[root]))


def _named(
    scheduled: Scheduled,
    plain: Fabric,
    fabric: Fabric,
    places: dict[str, str],
    links: dict[str, str],
) -> Scheduled:
    """A schedule of the canonical fabric in the names of this one."""
    known: dict[Send, Send] = {}

    def named(send: Send) -> Send:
        if send not in known:
            hops = tuple((links[link], places[a], places[b]) for link, a, b in send.hops)
            known[send] = Send(places[send.src], places[send.dst], hops)
        return known[send]

    section = scheduled.section
    trees = tuple(
        Tree(
            places[tree.root],
            tree.share,
            tuple(map(named, tree.reduce)),
            tuple(map(named, tree.broadcast)),
        )
        for tree in section.trees
    )
    certificate = scheduled.certificate
    if isinstance(certificate, LinkCut):
        certificate = replace(certificate, side=tuple(places[p] for p in certificate.side))
    elif isinstance(certificate, Partition):
        parts = tuple(tuple(places[p] for p in part) for part in certificate.parts)
        certificate = replace(certificate, parts=parts)
    else:
        # Channels of the canonical fabric come in another order than those of this one.
        order = _channel_order(plain, fabric, places, links)
        certificate = replace(certificate, price=tuple(certificate.price[c] for c in order))
    ranks = fabric.places[: fabric.num_ranks]
    return Scheduled(replace(section, ranks=ranks, trees=trees), certificate)


def _channel_order(
    plain: Fabric, fabric: Fabric, places: dict[str, str], links: dict[str, str]
) -> list[int]:
    """For each channel of the fabric its number in the canonical one."""
    number = {
        (
            links[arc.link],
            places[plain.places[arc.tail]],
            places[plain.places[arc.head]],
        ): arc.channel
        for arc in plain.arcs
    }
    order = [0] * len(fabric.capacity)
    for arc in fabric.arcs:
        order[arc.channel] = number[arc.link, fabric.places[arc.tail], fabric.places[arc.head]]
    return order


def _root(fabric: Fabric, collective: Collective, root: str | None) -> int:
    ranks = fabric.places[: fabric.num_ranks]
    if root is not None:
        return ranks.index(root)
    if collective in ("broadcast", "reduce") and not fabric.has_shared_channels:
        return best_root(fabric, is_reduce=collective == "reduce")
    return 0


def _plain(
    cluster: Cluster, fabric: Fabric, collective: Collective, root: int, relay: bool
) -> Iterator[Communication]:
    """Baseline schedules (rings, chains, trees) that exist on this fabric."""
    if collective == "alltoall":
        yield shortest_exchange(fabric)
        return
    found = (
        chains.ring(fabric, collective, root),
        chains.chain(fabric, collective, root),
        chains.double_binary_tree(fabric, collective, root),
        chains.one_hop(fabric, collective, root),
        chains.shallow_tree(fabric, collective, root),
    )
    yield from (section for section in found if section is not None)
    if fabric.is_peer_only:
        ranks = fabric.places[: fabric.num_ranks]
        try:
            host = fabric_of(cluster, ranks, relay=relay, links="host")
        except NoFeasiblePlanError:
            return
        yield chains.ring_in_order(host, collective, root, algorithm="ring over PCIe")


def _offer(section: Communication, cluster: Cluster) -> Offer:
    return Offer(section, section.rate_bps(cluster), CollectiveTimes(section, cluster))


def _choose(offers: Sequence[Offer], size_bytes: int | None) -> Offer:
    if size_bytes is None:
        return min(
            offers,
            key=lambda offer: (
                -offer.rate_bps, len(offer.section.trees), offer.times.time_s(_LARGE_BYTES),
            ),
        )  # fmt: skip
    return min(offers, key=lambda offer: (offer.times.time_s(size_bytes), len(offer.section.trees)))
