"""Strength of an undirected graph: the least (links between parts) / (parts - 1) over partitions.

Nash-Williams and Tutte (1961): as many spanning trees can be packed, in fractions. Newton's method
on the ratio: for a rate, the partition with the least (crossing - rate · parts) comes from one
minimum cut per node (Cunningham, 1985; Barahona, 1992): give each node in turn the largest value
that keeps the sum over every set of earlier nodes within crossing(set) - 2 · rate, and join the
sets that are tight. Exact fractions; O(nodes) flows per step, few steps.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.communication.certificate import Partition
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import UNLIMITED, flow_graph, max_flow


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
