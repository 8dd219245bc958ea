"""Every collective on any fabric, by column generation: buses, half duplex, one-way links.

A pattern is what one unit of the collective needs: a tree away from the root (broadcast), towards
it (reduce), one per rank (all-gather, reduce-scatter), or one towards and one away from the same
root (all-reduce). Its cheapest form under prices of the channels is made of cheapest arborescences
over the cheapest ways. Slower than packing and splitting, which need full-duplex links, but it
needs nothing; the prices are the certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.plan.sections.communication import Collective
from hocket.planners.communication.arborescence import cheapest_arborescence
from hocket.planners.communication.columns import CHEAP, Mix, Pattern, best_mix
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.ways import Path, Ways


@dataclass(frozen=True)
class TreeBundle:
    """Trees that deliver one unit of a collective together."""

    trees: tuple[tuple[int, tuple[tuple[int, int, Path], ...], bool], ...]
    """(root, sends (from, to, arcs), whether they lead towards the root)."""


def best_bundles(fabric: Fabric, collective: Collective, root: int) -> Mix[TreeBundle]:
    """The mix of bundles with the largest total; a gather moves one share of each rank per unit."""

    good_roots = list(range(fabric.num_ranks))

    def cheapest(price: Sequence[Any]) -> Pattern[TreeBundle]:
        ways = Ways(fabric, [price[arc.channel] for arc in fabric.arcs])
        bundle = TreeBundle(tuple(_trees(ways, fabric.num_ranks, collective, root, good_roots)))
        usage: dict[int, int] = {}
        for _, sends, _ in bundle.trees:
            for _, _, path in sends:
                for arc in path:
                    channel = fabric.arcs[arc].channel
                    usage[channel] = usage.get(channel, 0) + 1
        return Pattern(usage, bundle)

    return best_mix(fabric.capacity, cheapest)


def _trees(
    ways: Ways, count: int, collective: Collective, root: int, good_roots: list[int]
) -> list[Any]:
    """Trees of the cheapest bundle; of an all-reduce those of the first good root that is cheap."""
    away = [row[:count] for row in ways.cost[:count]]
    towards = [list(column) for column in zip(*away, strict=True)]
    if collective in ("broadcast", "reduce"):
        is_reduce = collective == "reduce"
        return [_tree(ways, towards if is_reduce else away, root, is_reduce)[1]]
    if collective in ("allgather", "reducescatter"):
        is_reduce = collective == "reducescatter"
        costs = towards if is_reduce else away
        return [_tree(ways, costs, rank, is_reduce)[1] for rank in range(count)]
    best: tuple[Any, list[Any]] | None = None
    for rank in tuple(good_roots):
        (first, into), (second, out) = (
            _tree(ways, towards, rank, True), _tree(ways, away, rank, False),
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


def _tree(ways: Ways, cost: list[list[Any]], root: int, is_reduce: bool) -> tuple[Any, Any]:
    """Cost of the cheapest tree and the tree; towards the root the arcs are turned around."""
    parent = cheapest_arborescence(cost, root)
    edges = [(parent[rank], rank) for rank in range(len(cost)) if rank != root]
    total = sum(cost[a][b] for a, b in edges)
    pairs = [(b, a) if is_reduce else (a, b) for a, b in edges]
    sends = tuple((a, b, ways.path(a, b)) for a, b in pairs)
    return total, (root, sends, is_reduce)
