"""The best schedule of a collective on a fabric, with the certificate that no other is faster.

Full-duplex links: cuts give the bound of broadcast and gather, switches are split off, trees are
packed in whole numbers; reductions are the same turned around; all-reduce packs undirected trees.
Anything else (buses, half duplex, one-way links) goes through column generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.arborescence import cheapest_arborescence
from hocket.planners.communication.certificate import Certificate, Partition, Prices
from hocket.planners.communication.columns import CHEAP, Mix, Pattern, best_mix
from hocket.planners.communication.cuts import broadcast_bound, gather_bound
from hocket.planners.communication.exchange import exchange_bound, exchange_section
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.few_trees import Edges, fewer_trees, heaviest
from hocket.planners.communication.flow import UNLIMITED, FlowGraph, flow_graph, max_flow
from hocket.planners.communication.packing import PackedTree, pack_trees
from hocket.planners.communication.paths import CheapestPaths, Path
from hocket.planners.communication.sends import (
    Edge,
    RoutedTree,
    both_directions,
    one_direction,
    rooted_at_centre,
    section_of,
)
from hocket.planners.communication.spanning import best_spanning_trees

# Switches replaced by direct arcs between ranks, at no loss (Frank, 1988; Jackson, 1988).
#
# Where every place can send what it receives, arcs u→w and w→t of a switch w can be replaced, piece
# by piece, by arcs u→t such that the flows into all ranks stay large enough, until w has none left
# (Bang-Jensen, Frank and Jackson, 1995). How much of a pair can go is the least slack of the sets
# that lose by it: those with w and a rank but neither u nor t, and those with u, t and a rank but
# not w; two flows per rank. A switch with equal links is first tried as a clique of equal arcs,
# which gives trees of one hop. O(links² · ranks) flows in all.


class CannotSplitError(Exception):
    """A switch that cannot send what it receives, and has no splitting without loss."""


@dataclass(frozen=True)
class Logical:
    """Direct capacities between ranks, and the arcs that they lead over."""

    matrix: LongArray
    """[rank, rank] in units of 1 / ``scale`` of the fabric's."""
    scale: int
    routes: dict[tuple[int, int], list[tuple[int, Path]]]
    """For each pair with capacity: (units, arcs from the first rank to the second)."""


def remove_switches(fabric: Fabric, scale: int, demand: LongArray) -> Logical:
    """Direct arcs among the ranks that still deliver ``demand[r]`` from each rank r to all others.

    The demand counts in units of 1 / ``scale`` of the fabric's; that of the result may be finer.
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
    """Capacities between all places, and the routes that each of them consists of."""

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
        """Equal arcs between all neighbours of a switch, if that is no loss."""
        into = self.capacity[self.arc[: self.count, switch]].copy()
        out = self.capacity[self.arc[switch, : self.count]].copy()
        into[switch] = out[switch] = 0
        near = np.flatnonzero(into)
        each = int(into[near[0]]) if len(near) > 2 else 0
        if each == 0 or not (np.all(into[near] == each) and np.array_equal(into, out)):
            return False
        factor = len(near) - 1
        trial = self.capacity * factor
        trial[self.arc[near, switch]] = 0
        trial[self.arc[switch, near]] = 0
        pairs = [(int(u), int(t)) for u in near for t in near if u != t]
        for u, t in pairs:
            trial[self.arc[u, t]] += each
        ok = reaches_all(
            self.graph, trial, self.residual, self.count, self.num_ranks, self.needed * factor
        )
        if not ok:
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
        """Pairs of arcs of a switch replaced until it has none."""
        max_splits = 4 * self.count * self.count
        made = np.zeros((max_splits, 3), dtype=np.int64)
        number = split_switch(
            self.graph, self.capacity, self.residual, self.arc, self.count, self.num_ranks, switch,
            self.needed, made,
        )  # fmt: skip
        if number < 0:
            raise CannotSplitError
        for u, t, units in made[:number].tolist():
            self._join(u, switch, t, units)

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


@kernel
def reaches_all(
    graph: FlowGraph,
    capacity: LongArray,
    residual: LongArray,
    source: int,
    num_ranks: int,
    needed: int,
) -> bool:
    """True if a flow of ``needed`` reaches every rank."""
    for rank in range(num_ranks):
        for arc in range(len(capacity)):
            residual[arc] = capacity[arc]
        if max_flow(graph, residual, source, rank, needed) < needed:
            return False
    return True


@kernel
def _slack(
    graph: FlowGraph, capacity: LongArray, residual: LongArray, arc: LongArray, count: int,
    num_ranks: int, u: int, w: int, t: int, needed: int, most: int,
) -> int:  # fmt: skip
    """Units of u→w→t, at most ``most``, that can become u→t."""
    source, sink = count, count + 1
    for rank in range(num_ranks):
        if rank not in (u, t):
            for a in range(len(capacity)):
                residual[a] = capacity[a]
            residual[arc[source, u]] = UNLIMITED
            residual[arc[source, t]] = UNLIMITED
            residual[arc[w, sink]] = UNLIMITED
            residual[arc[rank, sink]] = UNLIMITED
            most = min(most, max_flow(graph, residual, source, sink, needed + most) - needed)
            if most <= 0:
                return 0
        for a in range(len(capacity)):
            residual[a] = capacity[a]
        residual[arc[source, w]] = UNLIMITED
        residual[arc[u, sink]] = UNLIMITED
        residual[arc[t, sink]] = UNLIMITED
        residual[arc[rank, sink]] = UNLIMITED
        most = min(most, max_flow(graph, residual, source, sink, needed + most) - needed)
        if most <= 0:
            return 0
    return most


@kernel
def split_switch(
    graph: FlowGraph, capacity: LongArray, residual: LongArray, arc: LongArray, count: int,
    num_ranks: int, w: int, needed: int, made: LongArray,
) -> int:  # fmt: skip
    """Split off all arcs of place ``w``; the number of (u, t, units) made, or -1."""
    number = 0
    for loops in range(2):
        for t in range(count):
            for u in range(count):
                # Going back where one came from wastes capacity: only what nothing else can use.
                if (u == t) != (loops == 1) or w in (u, t):
                    continue
                most = min(capacity[arc[u, w]], capacity[arc[w, t]])
                if most <= 0:
                    continue
                most = _slack(
                    graph, capacity, residual, arc, count, num_ranks, u, w, t, needed, most
                )
                if most <= 0:
                    continue
                capacity[arc[u, w]] -= most
                capacity[arc[w, t]] -= most
                if u != t:
                    capacity[arc[u, t]] += most
                made[number, 0], made[number, 1], made[number, 2] = u, t, most
                number += 1
    for u in range(count):
        if u != w and (capacity[arc[u, w]] > 0 or capacity[arc[w, u]] > 0):
            return -1
    return number


# Every collective on any fabric, by column generation: buses, half duplex, one-way links.
#
# A pattern is what one unit of the collective needs: a tree away from the root (broadcast), towards
# it (reduce), one per rank (all-gather, reduce-scatter), or one towards and one away from the same
# root (all-reduce). Its cheapest form under prices of the channels is made of cheapest
# arborescences over the cheapest paths. Slower than packing and splitting, which need full-duplex
# links, but it needs nothing; the prices are the certificate.


@dataclass(frozen=True)
class TreeBundle:
    """Trees that deliver one unit of a collective together."""

    trees: tuple[tuple[int, tuple[tuple[int, int, Path], ...], bool], ...]
    """(root, sends (from, to, arcs), True if they lead towards the root)."""


def best_bundles(fabric: Fabric, collective: Collective, root: int) -> Mix[TreeBundle]:
    """The mix of bundles with the largest total; a gather moves one share of each rank per unit."""

    good_roots = list(range(fabric.num_ranks))

    def cheapest(price: Sequence[Any]) -> Pattern[TreeBundle]:
        paths = CheapestPaths(fabric, [price[arc.channel] for arc in fabric.arcs])
        bundle = TreeBundle(tuple(_trees(paths, fabric.num_ranks, collective, root, good_roots)))
        usage: dict[int, int] = {}
        for _, sends, _ in bundle.trees:
            for _, _, path in sends:
                for arc in path:
                    channel = fabric.arcs[arc].channel
                    usage[channel] = usage.get(channel, 0) + 1
        return Pattern(usage, bundle)

    return best_mix(fabric.capacity, cheapest)


def _trees(
    paths: CheapestPaths, count: int, collective: Collective, root: int, good_roots: list[int]
) -> list[Any]:
    """Trees of the cheapest bundle; of an all-reduce those of the first good root that is cheap."""
    away = [row[:count] for row in paths.cost[:count]]
    towards = [list(column) for column in zip(*away, strict=True)]
    if collective in ("broadcast", "reduce"):
        is_reduce = collective == "reduce"
        return [_tree(paths, towards if is_reduce else away, root, is_reduce)[1]]
    if collective in ("allgather", "reducescatter"):
        is_reduce = collective == "reducescatter"
        costs = towards if is_reduce else away
        return [_tree(paths, costs, rank, is_reduce)[1] for rank in range(count)]
    best: tuple[Any, list[Any]] | None = None
    for rank in tuple(good_roots):
        (first, into), (second, out) = (
            _tree(paths, towards, rank, True), _tree(paths, away, rank, False),
        )  # fmt: skip
        if best is None or first + second < best[0]:
            best = first + second, [into, out]
        if best[0] < CHEAP:
            break
        # It was not worth it: the others are tried before it next time.
        good_roots.remove(rank)
        good_roots.append(rank)
    assert best is not None
    return best[1]


def _tree(
    paths: CheapestPaths, cost: list[list[Any]], root: int, is_reduce: bool
) -> tuple[Any, Any]:
    """Cost of the cheapest tree and the tree; towards the root the arcs are turned around."""
    parent = cheapest_arborescence(cost, root)
    edges = [(parent[rank], rank) for rank in range(len(cost)) if rank != root]
    total = sum(cost[a][b] for a, b in edges)
    pairs = [(b, a) if is_reduce else (a, b) for a, b in edges]
    sends = tuple((a, b, paths.path(a, b)) for a, b in pairs)
    return total, (root, sends, is_reduce)


# Strength of an undirected graph: the least (links between parts) / (parts - 1) over partitions.
#
# Nash-Williams and Tutte (1961): as many spanning trees can be packed, in fractions. Newton's
# method on the ratio: for a rate, the partition with the least (crossing - rate · parts) comes from
# one minimum cut per node (Cunningham, 1985; Barahona, 1992): give each node in turn the largest
# value that keeps the sum over every set of earlier nodes within crossing(set) - 2 · rate, and join
# the sets that are tight. Exact fractions; O(nodes) flows per step, few steps.


def strength_bound(fabric: Fabric) -> Partition:
    """The strength of a symmetric fabric without switches, and the partition that shows it."""
    matrix = fabric.matrix
    parts = [[node] for node in range(len(matrix))]
    rate = _ratio(matrix, parts)
    while True:
        finer = _weakest(matrix, rate)
        better = _ratio(matrix, finer) if len(finer) > 1 else rate
        if better >= rate:
            break
        parts, rate = finer, better
    names = tuple(tuple(fabric.places[node] for node in part) for part in parts)
    return Partition(rate, names, _between(matrix, parts))


def _between(matrix: LongArray, parts: list[list[int]]) -> int:
    inside = sum(int(matrix[np.ix_(part, part)].sum()) for part in parts)
    return (int(matrix.sum()) - inside) // 2


def _ratio(matrix: LongArray, parts: list[list[int]]) -> Fraction:
    return Fraction(_between(matrix, parts), len(parts) - 1)


def _weakest(matrix: LongArray, rate: Fraction) -> list[list[int]]:
    """The partition with the least crossing - rate · parts."""
    count = len(matrix)
    source, sink = count, count + 1
    tails, heads = np.nonzero(np.triu(matrix))
    nodes = np.arange(count)
    feeds = np.stack((np.full(count, source), nodes), axis=1)
    drains = np.stack((nodes, np.full(count, sink)), axis=1)
    pairs = np.concatenate((np.stack((tails, heads), axis=1), feeds, drains)).astype(np.int64)
    graph, place = flow_graph(count + 2, pairs)
    inner, feed, drain = np.split(place, [len(tails), len(tails) + count])
    units = matrix[tails, heads] * rate.denominator
    value = [0] * count
    parts: list[set[int]] = []
    for node in range(count):
        # The set S of nodes up to this one that contains it, with least crossing(S) - value(S):
        # a positive value draws a node into S (the source side), a negative one keeps it out.
        capacity = np.zeros(len(graph.arc_head), dtype=np.int64)
        capacity[inner] = units
        capacity[graph.arc_reverse[inner]] = units
        drawn = 0
        for other in range(count):
            if other == node:
                capacity[feed[other]] = UNLIMITED // 4
            elif other > node:
                capacity[drain[other]] = UNLIMITED // 4
            elif value[other] > 0:
                capacity[feed[other]] = value[other]
                drawn += value[other]
            else:
                capacity[drain[other]] = -value[other]
        flow = int(max_flow(graph, capacity, source, sink, UNLIMITED // 2))
        value[node] = flow - drawn - 2 * rate.numerator
        tight = {int(n) for n in np.flatnonzero(graph.level[:count] >= 0)}
        joined = [part for part in parts if part & tight]
        parts = [part for part in parts if not part & tight]
        parts.append(tight.union(*joined))
    return [sorted(part) for part in parts]


PACKED = "packed trees"
Weighted = tuple[Fraction, tuple[Edge, ...]]


@dataclass(frozen=True)
class Scheduled:
    """A schedule, and the bound that it is measured against."""

    section: Communication
    certificate: Certificate


def best_schedule(
    fabric: Fabric, collective: Collective, root: int, *, max_trees: int | None = None
) -> Scheduled:
    """The schedule with the largest rate; of an all-reduce at most ``max_trees``, the heaviest."""
    if collective == "alltoall":
        exchange = exchange_bound(fabric)
        return Scheduled(exchange_section(fabric, exchange), exchange.certificate)
    if collective == "allreduce" and fabric.is_symmetric:
        return _all_reduce(fabric, root, max_trees)
    if collective != "allreduce" and not fabric.has_shared_channels:
        # Full-duplex links balance every switch, which then splits; others may or may not.
        with suppress(CannotSplitError):
            return _by_packing(fabric, collective, root)
    return _by_columns(fabric, collective, root)


def bound_of(fabric: Fabric, collective: Collective, root: int) -> Certificate:
    """The bound alone, for fabrics too large to pack."""
    if collective == "alltoall":
        return exchange_bound(fabric).certificate
    if fabric.is_symmetric and collective in ("broadcast", "reduce"):
        return broadcast_bound(fabric, root, is_reduce=collective == "reduce")
    if fabric.is_symmetric and collective in ("allgather", "reducescatter"):
        return gather_bound(fabric, is_reduce=collective == "reducescatter")
    return best_schedule(fabric, collective, root).certificate


def _by_packing(fabric: Fabric, collective: Collective, root: int) -> Scheduled:
    is_reduce = collective in ("reduce", "reducescatter")
    shown = fabric.turned_around() if is_reduce else fabric
    demand = np.zeros(fabric.num_ranks, dtype=np.int64)
    if collective in ("broadcast", "reduce"):
        certificate, scale = broadcast_bound(shown, root), 1
        demand[root] = certificate.crossing
    else:
        certificate = gather_bound(shown)
        each = certificate.bound / fabric.num_ranks
        demand[:], scale = each.numerator, each.denominator
    logical = remove_switches(shown, scale, demand)
    packed = pack_trees(logical.matrix, demand * (logical.scale // scale))
    trees = [one_direction(fabric, tree, is_reduce=is_reduce) for tree in _routed(logical, packed)]
    return Scheduled(section_of(fabric, collective, root, PACKED, trees), certificate)


class _Routes:
    """Capacity left on the paths between pairs of ranks."""

    def __init__(self, routes: Iterable[tuple[tuple[int, int], int, Path]]) -> None:
        self._left: dict[tuple[int, int], dict[Path, Fraction]] = {}
        for pair, units, path in routes:
            paths = self._left.setdefault(pair, {})
            paths[path] = paths.get(path, Fraction(0)) + units

    def take(
        self, weight: Fraction, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Fraction, tuple[Edge, ...]]]:
        """Choose a path per edge of a tree, and split the tree where a path is too narrow."""
        while weight > 0:
            edges = tuple(
                (*pair, max(self._left[pair], key=self._left[pair].__getitem__)) for pair in pairs
            )
            piece = min(weight, *(self._left[a, b][path] for a, b, path in edges))
            for a, b, path in edges:
                self._left[a, b][path] -= piece
            weight -= piece
            yield piece, edges


def _routed(logical: Logical, packed: Sequence[PackedTree]) -> Iterator[RoutedTree]:
    """Packed trees over the routes that are left once switches are split off."""
    routes = _Routes(
        (pair, units, path) for pair, of_pair in logical.routes.items() for units, path in of_pair
    )
    for tree in packed:
        pairs = [(a, b) for b, a in enumerate(tree.parent) if a >= 0]
        for piece, edges in routes.take(Fraction(tree.weight), pairs):
            yield RoutedTree(piece, tree.root, edges)


def _over_links(fabric: Fabric, trees: Sequence[tuple[Fraction, Edges]]) -> Iterator[Weighted]:
    """Undirected trees of a fabric without switches, over its links in parallel."""
    routes = _Routes(
        ((arc.tail, arc.head), fabric.capacity[arc.channel], (index,))
        for index, arc in enumerate(fabric.arcs)
        if arc.tail < arc.head
    )
    for weight, edges in trees:
        yield from routes.take(weight, [(min(pair), max(pair)) for pair in edges])


def _all_reduce(fabric: Fabric, root: int, max_trees: int | None) -> Scheduled:
    mix, price = best_spanning_trees(fabric)
    certificate: Certificate
    if fabric.has_switches:
        certificate = Prices(mix.value, price)
        routed = [(weight, pattern.payload.edges) for weight, pattern in mix.weighted]
    else:
        certificate = strength_bound(fabric)
        routed = list(_over_links(fabric, fewer_trees(fabric, mix)))
    if max_trees is not None:
        routed = heaviest(routed, max_trees)
    trees = [both_directions(fabric, rooted_at_centre(weight, edges)) for weight, edges in routed]
    return Scheduled(section_of(fabric, "allreduce", root, PACKED, trees), certificate)


def _by_columns(fabric: Fabric, collective: Collective, root: int) -> Scheduled:
    mix = best_bundles(fabric, collective, root)
    is_gather = collective in ("allgather", "reducescatter")
    times = fabric.num_ranks if is_gather else 1
    certificate = Prices(mix.value * times, tuple(price / times for price in mix.price))
    trees = []
    for weight, pattern in mix.weighted:
        if collective == "allreduce":
            into, out = (
                RoutedTree(weight, tree_root, sends)
                for tree_root, sends, _ in pattern.payload.trees
            )
            first = one_direction(fabric, into, is_reduce=True, is_turned=True)
            second = one_direction(fabric, out, is_reduce=False)
            trees.append(replace(first, broadcast=second.broadcast))
            continue
        for tree_root, sends, is_reduce in pattern.payload.trees:
            tree = RoutedTree(weight, tree_root, sends)
            trees.append(one_direction(fabric, tree, is_reduce=is_reduce, is_turned=is_reduce))
    return Scheduled(section_of(fabric, collective, root, PACKED, trees), certificate)
