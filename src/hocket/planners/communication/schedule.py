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

import numpy as np

from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.certificate import Certificate, Prices
from hocket.planners.communication.cuts import broadcast_bound, gather_bound
from hocket.planners.communication.directed import best_bundles
from hocket.planners.communication.exchange import exchange_bound, exchange_section
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.few_trees import Edges, fewer_trees, heaviest
from hocket.planners.communication.packing import PackedTree, pack_trees
from hocket.planners.communication.sends import (
    Edge,
    RoutedTree,
    both_ways,
    one_way,
    rooted_at_centre,
    section_of,
)
from hocket.planners.communication.spanning import best_spanning_trees
from hocket.planners.communication.splitting import CannotSplitError, Logical, remove_switches
from hocket.planners.communication.strength import strength_bound
from hocket.planners.communication.ways import Path

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
    trees = [one_way(fabric, tree, is_reduce=is_reduce) for tree in _routed(logical, packed)]
    return Scheduled(section_of(fabric, collective, root, PACKED, trees), certificate)


class _Routes:
    """What is left of the ways between pairs of ranks."""

    def __init__(self, ways: Iterable[tuple[tuple[int, int], int, Path]]) -> None:
        self._left: dict[tuple[int, int], dict[Path, Fraction]] = {}
        for pair, units, path in ways:
            paths = self._left.setdefault(pair, {})
            paths[path] = paths.get(path, Fraction(0)) + units

    def take(
        self, weight: Fraction, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Fraction, tuple[Edge, ...]]]:
        """Ways for the edges of a tree; one that needs several of a pair becomes several trees."""
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
    """Packed trees with the ways that the splitting of switches left."""
    routes = _Routes(
        (pair, units, path) for pair, ways in logical.routes.items() for units, path in ways
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
    trees = [both_ways(fabric, rooted_at_centre(weight, edges)) for weight, edges in routed]
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
            first = one_way(fabric, into, is_reduce=True, is_turned=True)
            second = one_way(fabric, out, is_reduce=False)
            trees.append(replace(first, broadcast=second.broadcast))
            continue
        for tree_root, sends, is_reduce in pattern.payload.trees:
            tree = RoutedTree(weight, tree_root, sends)
            trees.append(one_way(fabric, tree, is_reduce=is_reduce, is_turned=is_reduce))
    return Scheduled(section_of(fabric, collective, root, PACKED, trees), certificate)
