"""Cheapest paths between ranks over switches and hosts, and the cheapest directed tree of ranks.

Paths follow Floyd and Warshall (1962), O(switches · places²). Ranks do not forward here: a
connection over a third rank is two edges of a tree. Trees follow Chu and Liu (1965) and Edmonds
(1967), O(ranks³). Costs may be floats or exact fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.planners.communication.fabric import Fabric

Path = tuple[int, ...]
"""Consecutive arcs of a fabric."""
NEVER = float("inf")


class CheapestPaths:
    """Costs of the cheapest paths between all places, and their arcs."""

    def __init__(self, fabric: Fabric, arc_cost: Sequence[Any]) -> None:
        count = fabric.num_places
        self.cost: list[list[Any]] = [[NEVER] * count for _ in range(count)]
        self._arc: list[list[int]] = [[-1] * count for _ in range(count)]
        self._over: list[list[int]] = [[-1] * count for _ in range(count)]
        for index, arc in enumerate(fabric.arcs):
            if arc_cost[index] < self.cost[arc.tail][arc.head]:
                self.cost[arc.tail][arc.head] = arc_cost[index]
                self._arc[arc.tail][arc.head] = index
        # Ranks are left out: only switches and hosts forward.
        for switch in range(fabric.num_ranks, count):
            self._allow(switch)

    def _allow(self, switch: int) -> None:
        """Allow paths over one more place."""
        count, there = len(self.cost), self.cost[switch]
        onward = [(head, there[head]) for head in range(count)
                  if head != switch and there[head] < NEVER]  # fmt: skip
        for tail in range(count):
            first = self.cost[tail][switch]
            if first == NEVER or tail == switch:
                continue
            row, over = self.cost[tail], self._over[tail]
            for head, rest in onward:
                if head != tail and first + rest < row[head]:
                    row[head], over[head] = first + rest, switch

    def path(self, tail: int, head: int) -> Path:
        """Return the arcs from one place to another."""
        over = self._over[tail][head]
        if over < 0:
            return (self._arc[tail][head],)
        return self.path(tail, over) + self.path(over, head)


# The cheapest tree away from a root in a directed graph (Chu and Liu, 1965; Edmonds, 1967).
#
# Every node chooses its cheapest incoming arc. If these form a cycle, it becomes one node whose
# incoming arcs cost what they would change, and the search continues in the smaller graph.


def cheapest_arborescence(cost: Sequence[Sequence[Any]], root: int) -> list[int]:
    """Return the parent of each node (-1 for the root); ``cost[a][b]`` is the cost of arc a→b."""
    count = len(cost)
    parent = [-1] * count
    for node in range(count):
        if node != root:
            into = [row[node] for row in cost]
            into[node] = NEVER
            parent[node] = into.index(min(into))
    cycle = _cycle(parent, root)
    if not cycle:
        return parent
    inside = set(cycle)
    outside = [node for node in range(count) if node not in inside]
    number = {node: index for index, node in enumerate(outside)}
    joined = len(outside)
    smaller: list[list[Any]] = [[NEVER] * (joined + 1) for _ in range(joined + 1)]
    enters: dict[int, int] = {}
    leaves: dict[int, int] = {}
    for a in outside:
        for b in outside:
            smaller[number[a]][number[b]] = cost[a][b]
        # The cheapest entry into the cycle replaces the arc of the node that it enters.
        entry = min(cycle, key=lambda b: (_change(cost, parent, a, b), b))
        enters[a], smaller[number[a]][joined] = entry, _change(cost, parent, a, entry)
        leave = min(cycle, key=lambda b: (cost[b][a], b))
        leaves[a], smaller[joined][number[a]] = leave, cost[leave][a]
    found = cheapest_arborescence(smaller, number[root])
    for a in outside:
        if a != root:
            above = found[number[a]]
            parent[a] = leaves[a] if above == joined else outside[above]
    above = outside[found[joined]]
    parent[enters[above]] = above
    return parent


def _change(cost: Sequence[Sequence[Any]], parent: list[int], a: int, b: int) -> Any:
    """Extra cost of entering a cycle over a→b, compared with b's arc inside the cycle."""
    return NEVER if cost[a][b] == NEVER else cost[a][b] - cost[parent[b]][b]


def _cycle(parent: list[int], root: int) -> list[int]:
    """Return the nodes of a cycle of parents; empty if all nodes lead to the root."""
    # State: 0 not visited, 1 on the current walk, 2 known to lead to the root.
    state = [0] * len(parent)
    state[root] = 2
    for start in range(len(parent)):
        node, walk = start, []
        while state[node] == 0:
            state[node] = 1
            walk.append(node)
            node = parent[node]
        if state[node] == 1:
            return walk[walk.index(node) :]
        for seen in walk:
            state[seen] = 2
    return []
