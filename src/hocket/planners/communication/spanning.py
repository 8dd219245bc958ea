"""All-reduce at the optimum: a fractional packing of undirected spanning trees.

On full-duplex links each tree reduces towards its root in one direction and broadcasts in the
other, so one unit uses an undirected link once. An edge of a tree is a link, or a path over
switches; the cheapest tree under prices of the links is a minimum spanning tree over the cheapest
paths. The prices at the optimum prove the bound; without switches it is the strength of the graph
(Nash-Williams and Tutte, 1961). Derivation: `docs/design/020-collectives-as-packed-trees.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hocket.planners.communication.cheapest_trees import CheapestPaths
from hocket.planners.communication.columns import Mix, Pattern, best_mix
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.trees import Edge

UndirectedEdges = tuple[Edge, ...]
"""Edges of a spanning tree of the ranks; each has the arcs in one of its directions."""


def best_spanning_trees(fabric: Fabric) -> tuple[Mix[UndirectedEdges], tuple[Fraction, ...]]:
    """Return the mix of spanning trees with the largest rate, and the dual price of every
    channel."""
    links = _UndirectedLinks(fabric)
    mix = best_mix(links.capacity, links.cheapest_tree)
    # Both directions of a link share its price, since a tree uses both.
    price = [mix.price[row] / 2 for row in links.row_of_channel]
    return mix, tuple(price)


class _UndirectedLinks:
    """The undirected links of a symmetric fabric, as rows of the linear program."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        row: dict[tuple[str, int, int], int] = {}
        self.capacity: list[int] = []
        self.row_of_arc: list[int] = []
        self.row_of_channel = [0] * len(fabric.capacity)
        for arc in fabric.arcs:
            key = (arc.link, min(arc.tail, arc.head), max(arc.tail, arc.head))
            if key not in row:
                row[key] = len(row)
                self.capacity.append(fabric.capacity[arc.channel])
            self.row_of_arc.append(row[key])
            self.row_of_channel[arc.channel] = row[key]

    def cheapest_tree(self, price: Sequence[Any]) -> Pattern[UndirectedEdges]:
        """Return the minimum spanning tree of the ranks (Prim, 1957)."""
        paths = CheapestPaths(self.fabric, [price[row] for row in self.row_of_arc])
        count = self.fabric.num_ranks
        near: list[Any] = list(paths.cost[0][:count])
        joined = [0] * count
        waiting = set(range(1, count))
        edges: list[Edge] = []
        usage: dict[int, int] = {}
        while waiting:
            rank = min(waiting, key=lambda other: (near[other], other))
            waiting.remove(rank)
            path = paths.path(joined[rank], rank)
            edges.append((joined[rank], rank, path))
            for arc in path:
                usage[self.row_of_arc[arc]] = usage.get(self.row_of_arc[arc], 0) + 1
            row = paths.cost[rank]
            for other in waiting:
                if row[other] < near[other]:
                    near[other], joined[other] = row[other], rank
        return Pattern(usage, tuple(edges))
