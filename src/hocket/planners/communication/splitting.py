"""Switches replaced by direct arcs between ranks, at no loss (Frank, 1988; Jackson, 1988).

Where every place can send what it receives, arcs u→w and w→t of a switch w can be replaced, piece
by piece, by arcs u→t such that the flows into all ranks stay large enough, until w has none left
(Bang-Jensen, Frank and Jackson, 1995). How much of a pair can go is the least slack of the sets
that lose by it: those with w and a rank but neither u nor t, and those with u, t and a rank but not
w; two flows per rank. A switch with equal links is first tried as a clique of equal arcs, which
gives trees of one hop. O(links² · ranks) flows in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import UNLIMITED, FlowGraph, flow_graph, max_flow
from hocket.planners.communication.ways import Path


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
    """Direct arcs among the ranks that still carry ``demand[r]`` from each rank r to all others.

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
    """Capacities between all places, and which way each of them leads."""

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
        self.room = np.zeros_like(self.capacity)

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
            self.graph, trial, self.room, self.count, self.num_ranks, self.needed * factor
        )
        if not ok:
            return False
        self.capacity, self.scale, self.needed = (
            trial, self.scale * factor, self.needed * factor,
        )  # fmt: skip
        self.routes = {
            pair: [(units * factor, path) for units, path in ways]
            for pair, ways in self.routes.items()
        }
        for u, t in pairs:
            self._join(u, switch, t, each)
        return True

    def split(self, switch: int) -> None:
        """Pairs of arcs of a switch replaced until it has none."""
        room_for = 4 * self.count * self.count
        made = np.zeros((room_for, 3), dtype=np.int64)
        number = split_switch(
            self.graph, self.capacity, self.room, self.arc, self.count, self.num_ranks, switch,
            self.needed, made,
        )  # fmt: skip
        if number < 0:
            raise CannotSplitError
        for u, t, units in made[:number].tolist():
            self._join(u, switch, t, units)

    def _join(self, u: int, switch: int, t: int, units: int) -> None:
        """Book ``units`` of the ways u→switch and switch→t as ways u→t."""
        while units > 0:
            first, second = self.routes[u, switch], self.routes[switch, t]
            (first_units, first_path), (second_units, second_path) = first[-1], second[-1]
            piece = min(units, first_units, second_units)
            for ways in (first, second):
                whole, path = ways.pop()
                if whole > piece:
                    ways.append((whole - piece, path))
            if u != t:
                ways = self.routes.setdefault((u, t), [])
                ways.append((piece, first_path + second_path))
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
    graph: FlowGraph, capacity: LongArray, room: LongArray, source: int, num_ranks: int, needed: int
) -> bool:
    """Whether a flow of ``needed`` reaches every rank."""
    for rank in range(num_ranks):
        for arc in range(len(capacity)):
            room[arc] = capacity[arc]
        if max_flow(graph, room, source, rank, needed) < needed:
            return False
    return True


@kernel
def _slack(
    graph: FlowGraph, capacity: LongArray, room: LongArray, arc: LongArray, count: int,
    num_ranks: int, u: int, w: int, t: int, needed: int, most: int,
) -> int:  # fmt: skip
    """How much of u→w→t, at most ``most``, can become u→t."""
    source, sink = count, count + 1
    for rank in range(num_ranks):
        if rank not in (u, t):
            for a in range(len(capacity)):
                room[a] = capacity[a]
            room[arc[source, u]] = UNLIMITED
            room[arc[source, t]] = UNLIMITED
            room[arc[w, sink]] = UNLIMITED
            room[arc[rank, sink]] = UNLIMITED
            most = min(most, max_flow(graph, room, source, sink, needed + most) - needed)
            if most <= 0:
                return 0
        for a in range(len(capacity)):
            room[a] = capacity[a]
        room[arc[source, w]] = UNLIMITED
        room[arc[u, sink]] = UNLIMITED
        room[arc[t, sink]] = UNLIMITED
        room[arc[rank, sink]] = UNLIMITED
        most = min(most, max_flow(graph, room, source, sink, needed + most) - needed)
        if most <= 0:
            return 0
    return most


@kernel
def split_switch(
    graph: FlowGraph, capacity: LongArray, room: LongArray, arc: LongArray, count: int,
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
                most = _slack(graph, capacity, room, arc, count, num_ranks, u, w, t, needed, most)
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
