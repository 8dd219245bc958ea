"""Cheapest paths between ranks over places that forward (Floyd, 1962; Warshall, 1962).

Ranks do not forward here: a connection over a third rank is two edges of a tree. Costs may be
floats or exact fractions. O(switches · places²).
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
