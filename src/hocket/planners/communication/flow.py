"""Maximum flow in whole numbers on a graph whose capacities change (Dinic, 1970).

Breadth-first levels from the source, then augmenting paths along rising levels until none is left;
the nodes that the last search reached are the source side of a minimum cut. Each pair of nodes is
one arc and its reverse, so residual capacities need no second copy. O(nodes² · arcs), in practice
near linear for the graphs of links here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray, pointers
from hocket.kernels import kernel

UNLIMITED = 2**62
"""Capacity without limit, half of the range of 64-bit integers."""


class FlowGraph(NamedTuple):
    """Arcs by tail (CSR) with scratch arrays for searches; capacities are kept separately."""

    arc_ptr: LongArray
    arc_head: LongArray
    arc_reverse: LongArray
    level: LongArray
    next_arc: LongArray
    path: LongArray


def flow_graph(num_nodes: int, pairs: LongArray) -> tuple[FlowGraph, LongArray]:
    """The graph with both arcs of each pair, and the place of each pair's first arc.

    ``pairs`` is [pair, 2]; the arc from its second node to its first is the reverse of the place.
    """
    num_pairs = len(pairs)
    tails = np.concatenate((pairs[:, 0], pairs[:, 1]))
    heads = np.concatenate((pairs[:, 1], pairs[:, 0]))
    order = np.argsort(tails, kind="stable")
    place = np.empty(2 * num_pairs, dtype=np.int64)
    place[order] = np.arange(2 * num_pairs)
    reverse = np.empty(2 * num_pairs, dtype=np.int64)
    reverse[place[:num_pairs]] = place[num_pairs:]
    reverse[place[num_pairs:]] = place[:num_pairs]
    arc_ptr = pointers(np.bincount(tails, minlength=num_nodes))
    graph = FlowGraph(
        arc_ptr=arc_ptr.astype(np.int64),
        arc_head=heads[order].astype(np.int64),
        arc_reverse=reverse,
        level=np.zeros(num_nodes, dtype=np.int64),
        next_arc=np.zeros(num_nodes, dtype=np.int64),
        path=np.zeros(num_nodes + 1, dtype=np.int64),
    )
    return graph, place[:num_pairs]


class Capacities(NamedTuple):
    """Capacities of a graph's arcs, and a copy that flows may use up."""

    graph: FlowGraph
    units: LongArray
    residual: LongArray


@kernel
def reset(capacities: Capacities) -> None:
    """Restore the residual capacities before the next flow."""
    for arc in range(len(capacities.units)):
        capacities.residual[arc] = capacities.units[arc]


class FedGraph(NamedTuple):
    """The graph of a capacity matrix with an extra last node that feeds the first ranks."""

    graph: FlowGraph
    capacity: LongArray
    """Capacities of all arcs; those of feeding arcs are 0 at first."""
    feed: LongArray
    """Index of the feeding arc of each rank."""


def fed_graph(matrix: LongArray, num_ranks: int) -> FedGraph:
    """Return the flow graph of ``matrix[tail, head]`` with a node that feeds the ranks."""
    count = len(matrix)
    # One pair of arcs per pair of nodes, whichever of the two directions has capacity.
    tails, heads = np.nonzero(np.triu(matrix + matrix.T))
    feeds = np.stack((np.full(num_ranks, count), np.arange(num_ranks)), axis=1)
    pairs = np.concatenate((np.stack((tails, heads), axis=1), feeds)).astype(np.int64)
    graph, place = flow_graph(count + 1, pairs)
    capacity = np.zeros(len(graph.arc_head), dtype=np.int64)
    inner = place[: len(tails)]
    capacity[inner] = matrix[tails, heads]
    capacity[graph.arc_reverse[inner]] = matrix[heads, tails]
    return FedGraph(graph, capacity, np.ascontiguousarray(place[len(tails) :]))


@kernel
def _find_levels(graph: FlowGraph, capacity: LongArray, source: int, sink: int) -> bool:
    """Set distances from the source over arcs with capacity; True if the sink was reached."""
    level, queue = graph.level, graph.path
    # `path` is free during the search for levels, so it serves as the queue.
    for node in range(len(level)):
        level[node] = -1
    level[source] = 0
    queue[0] = source
    first, last = 0, 1
    while first < last and level[sink] < 0:
        node = queue[first]
        first += 1
        for arc in range(graph.arc_ptr[node], graph.arc_ptr[node + 1]):
            head = graph.arc_head[arc]
            if capacity[arc] > 0 and level[head] < 0:
                level[head] = level[node] + 1
                queue[last] = head
                last += 1
    reached: bool = level[sink] >= 0
    return reached


@kernel
def _fill_levels(graph: FlowGraph, capacity: LongArray, source: int, sink: int, limit: int) -> int:
    """Augment along rising levels until no path is left or ``limit`` flows."""
    path, total, length, node = graph.path, 0, 0, source
    while True:
        if node == sink:
            amount = limit - total
            for index in range(length):
                amount = min(amount, capacity[path[index]])
            total += amount
            keep = length
            for index in range(length - 1, -1, -1):
                arc = path[index]
                capacity[arc] -= amount
                capacity[graph.arc_reverse[arc]] += amount
                if capacity[arc] == 0:
                    keep = index
            if total >= limit:
                return total
            # Continue at the tail of the first arc that is full now: the path before it is still
            # usable.
            length = keep
            node = source if length == 0 else graph.arc_head[path[length - 1]]
        end, arc = graph.arc_ptr[node + 1], graph.next_arc[node]
        while arc < end and not (
            capacity[arc] > 0 and graph.level[graph.arc_head[arc]] == graph.level[node] + 1
        ):
            arc += 1
        graph.next_arc[node] = arc
        if arc < end:
            path[length] = arc
            length += 1
            node = graph.arc_head[arc]
        elif length == 0:
            return total
        else:
            length -= 1
            # Dead end: go back, and skip the arc that led here.
            back = path[length]
            node = graph.arc_head[graph.arc_reverse[back]]
            graph.next_arc[node] += 1


@kernel
def max_flow(graph: FlowGraph, capacity: LongArray, source: int, sink: int, limit: int) -> int:
    """Return the flow from source to sink, at most ``limit``; ``capacity`` becomes the residual.

    If the flow is below the limit, ``level >= 0`` marks the source side of a minimum cut.
    """
    total = 0
    while total < limit and _find_levels(graph, capacity, source, sink):
        for node in range(len(graph.level)):
            graph.next_arc[node] = graph.arc_ptr[node]
        total += _fill_levels(graph, capacity, source, sink, limit - total)
    return total
