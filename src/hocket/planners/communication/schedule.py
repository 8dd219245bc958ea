"""The best schedule of a collective on a fabric, with the certificate that no other is faster.

Full-duplex links: cuts give the bound of broadcast and gather (`cuts`), switches are split off, and
trees are packed in whole numbers (`packing`); reductions are the same on the reversed fabric.
All-reduce packs undirected spanning trees (`spanning`). Fabrics with buses, half-duplex or one-way
links go through column generation (`columns`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.plan.sections.communication import Collective, Communication, Tree
from hocket.planners.communication.cheapest_trees import CheapestPaths, Path, cheapest_arborescence
from hocket.planners.communication.columns import CHEAP, Mix, Pattern, best_mix
from hocket.planners.communication.cuts import Certificate, Prices, broadcast_bound, gather_bound
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import (
    UNLIMITED,
    Capacities,
    flow_graph,
    max_flow,
    reset,
)
from hocket.planners.communication.packing import fewer_trees, pack_trees
from hocket.planners.communication.spanning import best_spanning_trees
from hocket.planners.communication.trees import (
    Edge,
    Pairs,
    centre,
    directed_tree,
    section_of,
    undirected_tree,
)

# Switches replaced by direct arcs between ranks, at no loss (Frank, 1988; Jackson, 1988).
#
# If every place can send as much as it receives, arcs u→w and w→t of a switch w can be replaced,
# piece by piece, by arcs u→t such that the flows into all ranks stay large enough, until w has none
# left (Bang-Jensen, Frank and Jackson, 1995). The amount of a pair that can be replaced is the
# least slack of the sets that lose by it: those with w and a rank but neither u nor t, and those
# with u, t and a rank but not w; two flows per rank. A switch with equal links is first tried as a
# clique of equal arcs, which gives trees of one hop. O(links² · ranks) flows in all.


class CannotSplitError(Exception):
    """A switch cannot be split off without loss of rate."""


@dataclass(frozen=True)
class Logical:
    """Direct capacities between ranks, and the routes over the fabric that provide them."""

    matrix: LongArray
    """Capacity by [rank, rank], in units of 1 / ``scale`` of the fabric's unit."""
    scale: int
    routes: dict[tuple[int, int], list[tuple[int, Path]]]
    """For each pair with capacity: (units, arcs from the first rank to the second)."""


def remove_switches(fabric: Fabric, scale: int, demand: LongArray) -> Logical:
    """Return direct arcs among ranks that still deliver ``demand[r]`` from each rank r to all
    others.

    The demand is in units of 1 / ``scale`` of the fabric's unit; the result's scale may be
    finer.
    """
    routes: dict[tuple[int, int], list[tuple[int, Path]]] = {}
    for index, arc in enumerate(fabric.arcs):
        units = fabric.capacity[arc.channel] * scale
        routes.setdefault((arc.tail, arc.head), []).append((units, (index,)))
    if not fabric.has_switches:
        return Logical(fabric.matrix * scale, scale, routes)
    state = _State(fabric.matrix * scale, fabric.num_ranks, demand, scale, routes)
    for switch in range(fabric.num_ranks, fabric.num_places):
        if not state.replace_by_clique(switch):
            state.split(switch)
    return state.logical()


class _State:
    """Capacity between every two places, and the routes over the fabric that provide it."""

    def __init__(
        self, matrix: LongArray, num_ranks: int, demand: LongArray, scale: int,
        routes: dict[tuple[int, int], list[tuple[int, Path]]],
    ) -> None:  # fmt: skip
        self.num_ranks, self.count, self.scale, self.routes = num_ranks, len(matrix), scale, routes
        source, sink = self.count, self.count + 1
        pairs = [(a, b) for a in range(self.count) for b in range(a + 1, self.count)]
        pairs += [(source, a) for a in range(self.count)]
        pairs += [(a, sink) for a in range(self.count)]
        self.graph, place = flow_graph(self.count + 2, np.array(pairs, dtype=np.int64))
        self.arc = np.full((self.count + 2, self.count + 2), -1, dtype=np.int64)
        for (a, b), arc in zip(pairs, place.tolist(), strict=True):
            self.arc[a, b], self.arc[b, a] = arc, self.graph.arc_reverse[arc]
        self.capacity = np.zeros(len(self.graph.arc_head), dtype=np.int64)
        tails, heads = np.nonzero(matrix)
        self.capacity[self.arc[tails, heads]] = matrix[tails, heads]
        self.capacity[self.arc[source, np.flatnonzero(demand)]] = demand[np.flatnonzero(demand)]
        self.needed = int(demand.sum())
        self.residual = np.zeros_like(self.capacity)

    def replace_by_clique(self, switch: int) -> bool:
        """Replace a switch by equal arcs between all neighbours; False if that is impossible or a
        loss."""
        into = self.capacity[self.arc[: self.count, switch]].copy()
        out = self.capacity[self.arc[switch, : self.count]].copy()
        into[switch] = out[switch] = 0
        near = np.flatnonzero(into)
        each = int(into[near[0]]) if len(near) > 2 else 0
        if each == 0 or not (np.all(into[near] == each) and np.array_equal(into, out)):
            return False
        # Multiplying all capacities keeps the equal parts of each link whole numbers.
        factor = len(near) - 1
        trial = self.capacity * factor
        trial[self.arc[near, switch]] = 0
        trial[self.arc[switch, near]] = 0
        pairs = [(int(u), int(t)) for u in near for t in near if u != t]
        for u, t in pairs:
            trial[self.arc[u, t]] += each
        # A clique is only good if it loses no rate.
        if not reaches_all(self._split(trial, factor)):
            return False
        self.capacity, self.scale, self.needed = (
            trial, self.scale * factor, self.needed * factor,
        )  # fmt: skip
        self.routes = {
            pair: [(units * factor, path) for units, path in of_pair]
            for pair, of_pair in self.routes.items()
        }
        for u, t in pairs:
            self._join(u, switch, t, each)
        return True

    def split(self, switch: int) -> None:
        """Replace pairs of arcs of a switch by direct ones until it has none left."""
        made = np.zeros((4 * self.count**2, 3), dtype=np.int64)
        number = split_switch(self._split(self.capacity, 1), switch, made)
        if number < 0:
            raise CannotSplitError
        for u, t, units in made[:number].tolist():
            self._join(u, switch, t, units)

    def _split(self, capacity: LongArray, factor: int) -> SplitGraph:
        """The arcs with other capacities, of which ``factor`` times the flow is needed."""
        capacities = Capacities(self.graph, capacity, self.residual)
        needed = self.needed * factor
        return SplitGraph(capacities, self.arc, self.count, self.num_ranks, needed)

    def _join(self, u: int, switch: int, t: int, units: int) -> None:
        """Join ``units`` of the routes u→switch and switch→t to routes u→t."""
        while units > 0:
            first, second = self.routes[u, switch], self.routes[switch, t]
            (first_units, first_path), (second_units, second_path) = first[-1], second[-1]
            piece = min(units, first_units, second_units)
            for of_pair in (first, second):
                whole, path = of_pair.pop()
                if whole > piece:
                    of_pair.append((whole - piece, path))
            # A route that returns to its start is dropped: it carries nothing anywhere.
            if u != t:
                of_pair = self.routes.setdefault((u, t), [])
                of_pair.append((piece, first_path + second_path))
            units -= piece

    def logical(self) -> Logical:
        ranks = np.arange(self.num_ranks)
        arcs = self.arc[ranks[:, None], ranks]
        matrix = np.where(arcs >= 0, self.capacity[arcs], 0)
        routes = {
            (tail, head): [(units, path) for units, path in self.routes[tail, head] if units]
            for tail, head in np.argwhere(matrix).tolist()
        }
        return Logical(matrix, self.scale, routes)


class SplitGraph(NamedTuple):
    """Arcs between all places, with a source and a sink beyond them."""

    capacities: Capacities
    arc: LongArray
    """[tail, head]: arc between two nodes; -1 if there is none."""
    num_places: int
    """Also the node of the source; that of the sink is one more."""
    num_ranks: int
    needed: int
    """Flow that must reach every rank."""


@kernel
def reaches_all(split: SplitGraph) -> bool:
    """True if the needed flow reaches every rank."""
    flows = split.capacities
    for rank in range(split.num_ranks):
        reset(flows)
        if (
            max_flow(flows.graph, flows.residual, split.num_places, rank, split.needed)
            < split.needed
        ):
            return False
    return True


@kernel
def _slack(split: SplitGraph, u: int, w: int, t: int, most: int) -> int:
    """Return the units of u→w→t, at most ``most``, that can be replaced by u→t."""
    flows, arc, source, sink = split.capacities, split.arc, split.num_places, split.num_places + 1
    residual = flows.residual
    for rank in range(split.num_ranks):
        for is_apart in range(2):
            # With u or t as the rank this kind of set does not exist.
            if is_apart == 1 and rank in (u, t):
                continue
            reset(flows)
            residual[arc[rank, sink]] = UNLIMITED
            if is_apart == 1:
                residual[arc[source, u]] = UNLIMITED
                residual[arc[source, t]] = UNLIMITED
                residual[arc[w, sink]] = UNLIMITED
            else:
                residual[arc[source, w]] = UNLIMITED
                residual[arc[u, sink]] = UNLIMITED
                residual[arc[t, sink]] = UNLIMITED
            flow = max_flow(flows.graph, residual, source, sink, split.needed + most)
            most = min(most, flow - split.needed)
            if most <= 0:
                return 0
    return most


@kernel
def split_switch(split: SplitGraph, w: int, made: LongArray) -> int:
    """Split off all arcs of place ``w``; returns the number of (u, t, units) made, or -1 on
    failure."""
    units, arc, number = split.capacities.units, split.arc, 0
    for loops in range(2):
        for t in range(split.num_places):
            for u in range(split.num_places):
                # Arcs back to where they came from waste capacity, so they are made last, of what
                # is left.
                if (u == t) != (loops == 1) or w in (u, t):
                    continue
                most = min(units[arc[u, w]], units[arc[w, t]])
                if most <= 0:
                    continue
                most = _slack(split, u, w, t, most)
                if most <= 0:
                    continue
                units[arc[u, w]] -= most
                units[arc[w, t]] -= most
                if u != t:
                    units[arc[u, t]] += most
                made[number, 0], made[number, 1], made[number, 2] = u, t, most
                number += 1
    for u in range(split.num_places):
        if u != w and (units[arc[u, w]] > 0 or units[arc[w, u]] > 0):
            return -1
    return number


# Every collective on any fabric, by column generation: buses, half duplex, one-way links.
#
# A pattern is what one unit of the collective needs: a tree away from the root (broadcast), towards
# it (reduce), one per rank (all-gather, reduce-scatter), or one towards and one away from the same
# root (all-reduce). Its cheapest form under prices of the channels is made of cheapest
# arborescences over the cheapest paths. It needs no full-duplex links, but is slower than packing;
# the prices are the certificate.

DirectedEdges = tuple[int, bool, tuple[Edge, ...]]
"""Root of a tree, True if its edges lead towards the root, and the edges in sending direction."""


def best_bundles(
    fabric: Fabric, collective: Collective, root: int
) -> Mix[tuple[DirectedEdges, ...]]:
    """Return the mix of patterns with the largest total; in a gather a unit is one shard per
    rank."""
    ranks = range(fabric.num_ranks)
    choices: list[list[tuple[int, bool]]] = {
        "broadcast": [[(root, False)]],
        "reduce": [[(root, True)]],
        "allgather": [[(rank, False) for rank in ranks]],
        "reducescatter": [[(rank, True) for rank in ranks]],
        "allreduce": [[(rank, True), (rank, False)] for rank in ranks],
    }[collective]

    def cheapest(price: Sequence[Any]) -> Pattern[tuple[DirectedEdges, ...]]:
        paths = CheapestPaths(fabric, [price[arc.channel] for arc in fabric.arcs])
        best: tuple[Any, tuple[DirectedEdges, ...]] | None = None
        for choice in choices:
            trees = [_cheapest_tree(paths, fabric.num_ranks, *each) for each in choice]
            cost = sum(cost for cost, _ in trees)
            if best is None or cost < best[0]:
                best = cost, tuple(tree for _, tree in trees)
            if cost < CHEAP:
                break
        assert best is not None
        paths_used = (path for _, _, edges in best[1] for _, _, path in edges)
        usage = Counter(fabric.arcs[arc].channel for path in paths_used for arc in path)
        return Pattern(usage, best[1])

    return best_mix(fabric.capacity, cheapest)


def _cheapest_tree(
    paths: CheapestPaths, count: int, root: int, is_reduce: bool
) -> tuple[Any, DirectedEdges]:
    """Return the cost of the cheapest tree away from a root, or towards it, and the tree."""
    cost = [row[:count] for row in paths.cost[:count]]
    if is_reduce:
        cost = [list(column) for column in zip(*cost, strict=True)]
    parents = enumerate(cheapest_arborescence(cost, root))
    pairs = [(rank, parent) if is_reduce else (parent, rank)
             for rank, parent in parents if rank != root]  # fmt: skip
    total = sum(paths.cost[a][b] for a, b in pairs)
    return total, (root, is_reduce, tuple((a, b, paths.path(a, b)) for a, b in pairs))


PACKED = "packed trees"


@dataclass(frozen=True)
class Scheduled:
    """A schedule, and the certificate of the bound on any schedule's rate."""

    section: Communication
    certificate: Certificate


def best_schedule(
    fabric: Fabric, collective: Collective, root: int, *, max_trees: int | None = None
) -> Scheduled:
    """Return the fastest schedule; of an all-reduce at most the ``max_trees`` heaviest trees."""
    if collective == "allreduce" and fabric.is_symmetric:
        return _all_reduce(fabric, root, max_trees)
    if collective != "allreduce" and not fabric.has_shared_channels:
        # Full-duplex links balance every switch, which then splits; others may or may not.
        with suppress(CannotSplitError):
            return _by_packing(fabric, collective, root)
    return _by_columns(fabric, collective, root)


def bound_of(fabric: Fabric, collective: Collective, root: int) -> Certificate:
    """Return only the bound, for fabrics that are too large for packing."""
    shown = fabric.reversed() if collective in _REDUCTIONS else fabric
    if fabric.is_symmetric and collective in ("broadcast", "reduce"):
        return broadcast_bound(shown, root)
    if fabric.is_symmetric and collective in ("allgather", "reducescatter"):
        return gather_bound(shown)
    return best_schedule(fabric, collective, root).certificate


_REDUCTIONS = ("reduce", "reducescatter")


def _by_packing(fabric: Fabric, collective: Collective, root: int) -> Scheduled:
    is_reduce = collective in _REDUCTIONS
    shown = fabric.reversed() if is_reduce else fabric
    demand = np.zeros(fabric.num_ranks, dtype=np.int64)
    if collective in ("broadcast", "reduce"):
        certificate, scale = broadcast_bound(shown, root), 1
        demand[root] = certificate.crossing
    else:
        certificate = gather_bound(shown)
        each = certificate.bound / fabric.num_ranks
        demand[:], scale = each.numerator, each.denominator
    logical = remove_switches(shown, scale, demand)
    trees = []
    for weight, tree_root, edges in _routed(logical, demand * (logical.scale // scale)):
        if is_reduce:
            towards = [(b, a, path[::-1]) for a, b, path in edges]
            trees.append(directed_tree(fabric, weight, tree_root, towards=towards))
        else:
            trees.append(directed_tree(fabric, weight, tree_root, away=edges))
    return Scheduled(section_of(fabric, collective, root, PACKED, trees), certificate)


class _Routes:
    """Remaining capacity on the paths between pairs of ranks."""

    def __init__(self, routes: Iterable[tuple[tuple[int, int], int, Path]]) -> None:
        self._left: dict[tuple[int, int], dict[Path, Fraction]] = {}
        for pair, units, path in routes:
            paths = self._left.setdefault(pair, {})
            paths[path] = paths.get(path, Fraction(0)) + units

    def take(self, weight: Fraction, pairs: Pairs) -> Iterator[tuple[Fraction, tuple[Edge, ...]]]:
        """Choose a path per edge of a tree, and split the tree if a path is too narrow."""
        while weight > 0:
            edges = tuple(
                (*pair, max(self._left[pair], key=self._left[pair].__getitem__)) for pair in pairs
            )
            # The widest path of each edge splits the tree least often.
            piece = min(weight, *(self._left[a, b][path] for a, b, path in edges))
            for a, b, path in edges:
                self._left[a, b][path] -= piece
            weight -= piece
            yield piece, edges


def _routed(
    logical: Logical, demand: LongArray
) -> Iterator[tuple[Fraction, int, tuple[Edge, ...]]]:
    """Yield packed trees (weight, root, edges) over the routes that replace the switches."""
    routes = _Routes(
        (pair, units, path) for pair, of_pair in logical.routes.items() for units, path in of_pair
    )
    for tree in pack_trees(logical.matrix, demand):
        pairs = [(a, b) for b, a in enumerate(tree.parent) if a >= 0]
        for piece, edges in routes.take(Fraction(tree.weight), pairs):
            yield piece, tree.root, edges


def _over_links(
    fabric: Fabric, trees: Iterable[tuple[Fraction, Pairs]]
) -> Iterator[tuple[Fraction, tuple[Edge, ...]]]:
    """Yield undirected trees of a fabric without switches, routed over its parallel links."""
    routes = _Routes(
        ((arc.tail, arc.head), fabric.capacity[arc.channel], (index,))
        for index, arc in enumerate(fabric.arcs)
        # An undirected link is listed once, by its arc from the smaller place.
        if arc.tail < arc.head
    )
    for weight, edges in trees:
        yield from routes.take(weight, [(min(pair), max(pair)) for pair in edges])


def _all_reduce(fabric: Fabric, root: int, max_trees: int | None) -> Scheduled:
    mix, price = best_spanning_trees(fabric)
    if fabric.has_switches:
        routed = [(weight, pattern.payload) for weight, pattern in mix.weighted]
    else:
        routed = list(_over_links(fabric, fewer_trees(fabric, mix)))
    if max_trees is not None:
        routed = sorted(routed, key=lambda tree: -tree[0])[:max_trees]
    trees = [
        undirected_tree(fabric, "allreduce", weight, centre([(a, b) for a, b, _ in edges]), edges)
        for weight, edges in routed
    ]
    section = section_of(fabric, "allreduce", root, PACKED, trees)
    return Scheduled(section, Prices(mix.value, price))


def _by_columns(fabric: Fabric, collective: Collective, root: int) -> Scheduled:
    mix = best_bundles(fabric, collective, root)
    times = fabric.num_ranks if collective in ("allgather", "reducescatter") else 1
    certificate = Prices(mix.value * times, tuple(price / times for price in mix.price))
    trees: list[Tree] = []
    for weight, pattern in mix.weighted:
        if collective == "allreduce":
            (tree_root, _, into), (_, _, out) = pattern.payload
            trees.append(directed_tree(fabric, weight, tree_root, towards=into, away=out))
            continue
        for tree_root, is_reduce, edges in pattern.payload:
            direction = {"towards" if is_reduce else "away": edges}
            trees.append(directed_tree(fabric, weight, tree_root, **direction))
    return Scheduled(section_of(fabric, collective, root, PACKED, trees), certificate)
