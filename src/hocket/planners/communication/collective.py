"""A planned collective: its bound, the best schedule, the baselines, and the choice among them.

The offer with the least simulated time is chosen or, if no size is given, the one with the largest
rate; ties go to the one with fewer trees. So the plan is never slower than a baseline that was
considered. `blink` packs trees as Blink does, for comparison.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import log

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.baselines import baselines, ring_in_order
from hocket.planners.communication.cheapest_trees import CheapestPaths, cheapest_arborescence
from hocket.planners.communication.cuts import Certificate, best_root
from hocket.planners.communication.fabric import MAX_RANKS, Fabric, LinkChoice, fabric_of
from hocket.planners.communication.schedule import best_schedule
from hocket.planners.communication.trees import Edge, section_of, undirected_tree
from hocket.simulate.collective import CollectiveTimes

# Trees as Blink packs them, for comparison: multiplicative weights, then few whole trees.
#
# Wang et al., MLSys 2020, after Garg and Könemann (1998): every link has a length that grows with
# its load; the shortest tree gets as much flow as its narrowest link allows, until the lengths
# add up to 1. Scaled down, the flow is within a few epsilon of the optimum, spread over many trees.
# Then an integer program over those trees takes whole units of them. O(links log links / epsilon²)
# trees.

Edges = tuple[Edge, ...]


def many_trees(fabric: Fabric, root: int, *, epsilon: float = 0.1) -> dict[Edges, float]:
    """Return the weights, in units, of the trees over which a broadcast from the root is spread."""
    count = len(fabric.capacity)
    # The constants of Garg and Könemann, which bound the error by epsilon.
    start = (1 + epsilon) * ((1 + epsilon) * count) ** (-1 / epsilon)
    length = [start / units for units in fabric.capacity]
    weights: dict[Edges, float] = defaultdict(float)
    while sum(y * c for y, c in zip(length, fabric.capacity, strict=True)) < 1:
        edges = _shortest_tree(fabric, root, length)
        usage = _usage(fabric, edges)
        flow = min(fabric.capacity[channel] / times for channel, times in usage.items())
        for channel, times in usage.items():
            length[channel] *= 1 + epsilon * flow * times / fabric.capacity[channel]
        weights[edges] += flow
    # Dividing by this factor makes the accumulated flow fit the capacities.
    scale = log((1 + epsilon) / start) / log(1 + epsilon)
    return {edges: weight / scale for edges, weight in weights.items()}


def _usage(fabric: Fabric, edges: Edges) -> Counter[int]:
    """Count how often a tree crosses each channel."""
    return Counter(fabric.arcs[arc].channel for _, _, path in edges for arc in path)


def _shortest_tree(fabric: Fabric, root: int, length: list[float]) -> Edges:
    paths = CheapestPaths(fabric, [length[arc.channel] for arc in fabric.arcs])
    count = fabric.num_ranks
    parent = cheapest_arborescence([row[:count] for row in paths.cost[:count]], root)
    return tuple((a, b, paths.path(a, b)) for b, a in enumerate(parent) if a >= 0)


def blink(
    fabric: Fabric, collective: Collective, root: int, *, epsilon: float = 0.1
) -> Communication | None:
    """Round the trees of multiplicative weights to whole units; None if Blink has no trees.

    An all-reduce reduces towards the root of each tree and broadcasts from it.
    """
    # Blink's trees need links with equal capacity in both directions.
    if collective not in ("broadcast", "reduce", "allreduce") or not fabric.is_symmetric:
        return None
    chosen = _whole_trees(fabric, list(many_trees(fabric, root, epsilon=epsilon)))
    trees = [undirected_tree(fabric, collective, weight, root, edges) for edges, weight in chosen]
    return section_of(fabric, collective, root, "blink", trees)


def _whole_trees(fabric: Fabric, trees: list[Edges]) -> list[tuple[Edges, Fraction]]:
    """Return whole units per tree, of largest total (integer program, HiGHS); one tree if none
    fits."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    load = np.zeros((len(fabric.capacity), len(trees)))
    for column, edges in enumerate(trees):
        for channel, times in _usage(fabric, edges).items():
            load[channel, column] = times
    ones = np.ones(len(trees))
    most = milp(
        -ones, integrality=ones, bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(load, ub=np.array(fabric.capacity, dtype=float)),
        options={"time_limit": 10.0},
    )  # fmt: skip
    # No whole unit fits: one tree alone, whose weight becomes a fraction of 1.
    if most.x is None or -most.fun < 1:
        return [(trees[0], Fraction(1))]
    units = zip(trees, np.rint(most.x).astype(int).tolist(), strict=True)
    return [(edges, Fraction(count)) for edges, count in units if count]


_LARGE_BYTES = 2**30
"""Message size at which offers of equal rate are compared if no size was given."""


@dataclass(frozen=True, eq=False)
class Offer:
    """One candidate schedule of the collective, with its rate and times."""

    section: Communication
    rate_bps: Fraction
    times: CollectiveTimes

    @property
    def name(self) -> str:
        """The name of the algorithm."""
        return self.section.algorithm

    @property
    def latency_s(self) -> float:
        """Seconds for an empty message."""
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
    """Packed trees first, then the baselines."""
    chosen: Offer
    plan_s: float
    """CPU seconds of computing the bound and packing trees."""

    @property
    def gap(self) -> float:
        """Relative gap between the chosen rate and the bound."""
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
    """Plan a collective; without a root, choose the one from which the collective is fastest.

    If ``with_blink``, trees of multiplicative weights are offered, too, which takes seconds.
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
    planned = best_schedule(fabric, collective, at, max_trees=max_trees)
    plan_s = time.process_time() - start_s
    found = [planned.section, *baselines(fabric, collective, at)]
    if fabric.is_peer_only:
        # NCCL falls back to rings over PCIe where NVLink does not form a ring.
        with suppress(NoFeasiblePlanError):
            host = fabric_of(cluster, ranks, relay=relay, links="host")
            found.append(ring_in_order(host, collective, at, algorithm="ring over PCIe"))
    known = blink(fabric, collective, at) if with_blink else None
    offers = tuple(_offer(section, cluster) for section in (*found, known) if section is not None)
    chosen = _choose(offers, size_bytes)
    size = size_bytes if size_bytes is not None else _LARGE_BYTES
    section = replace(chosen.section, num_chunks=chosen.times.num_chunks(size))
    return CollectivePlan(
        cluster=cluster, fabric=fabric, collective=collective, root=at, size_bytes=size_bytes,
        bound_bps=planned.certificate.bound * fabric.unit_bps, certificate=planned.certificate,
        offers=offers, chosen=replace(chosen, section=section), plan_s=plan_s,
    )  # fmt: skip


def _root(fabric: Fabric, collective: Collective, root: str | None) -> int:
    if root is not None:
        return fabric.places.index(root)
    # For other collectives the root does not matter; with shared channels no flow bounds a root.
    if collective in ("broadcast", "reduce") and not fabric.has_shared_channels:
        return best_root(fabric.reversed() if collective == "reduce" else fabric)
    return 0


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
