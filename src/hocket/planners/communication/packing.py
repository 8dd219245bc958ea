"""Packing of rooted spanning trees in whole numbers (Edmonds, 1973; proof by Lovász, 1976).

Given how many trees each rank is the root of, trees are grown one after the other with the largest
weight that is still possible, so that equal trees are one. An arc (a, b) out of the tree can take
weight up to the amount by which a maximum flow into b, from the roots of all other trees and from
a, exceeds those other trees; Lovász's argument promises such an arc while the tree does not span.
If only a smaller weight can continue, the tree continues with it and the rest is returned. One flow
per arc that is tried; arcs near the root come first, which keeps the trees shallow.

`fewer_trees` packs the trees of an all-reduce anew, so that few heavy trees replace many light
ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.planners.communication.columns import Mix
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.flow import (
    UNLIMITED,
    Capacities,
    fed_graph,
    max_flow,
    reset,
)
from hocket.planners.communication.spanning import UndirectedEdges
from hocket.planners.communication.trees import edges_from


@dataclass(frozen=True)
class PackedTree:
    """A spanning tree that sends ``weight`` units from its root."""

    weight: int
    root: int
    parent: tuple[int, ...]
    """Parent of each rank; -1 for the root."""


def pack_trees(matrix: LongArray, demand: LongArray) -> list[PackedTree]:
    """Pack trees of ``demand[r]`` units from each root r within the arc capacities ``matrix``.

    Such trees exist exactly if a flow of all demands reaches every rank, which the caller
    ensures.
    """
    count = len(matrix)
    graph, units, feed = fed_graph(matrix, count)
    units[feed] = demand
    tree = _Tree(*np.zeros((3, count), dtype=np.int64))
    capacities = Capacities(graph, units, np.zeros_like(units))
    trees: list[PackedTree] = []
    left = int(demand.sum())
    while left > 0:
        root = int(np.argmax(units[feed]))
        weight = int(grow_tree(capacities, feed, tree, root, left))
        if weight <= 0:
            # Only a bug or demands that exceed the bound can lead here.
            raise AssertionError("no arc can be added though the flows promise one")
        trees.append(PackedTree(weight, root, tuple(tree.parent.tolist())))
        left -= weight
    return trees


class _Tree(NamedTuple):
    """A tree that grows."""

    parent: LongArray
    """[rank]: its parent; -1 for the root, -2 if it is not in the tree."""
    order: LongArray
    """Ranks in the order in which they joined."""
    arc_of: LongArray
    """[rank]: the arc from its parent."""


@kernel
def grow_tree(capacities: Capacities, feed: LongArray, tree: _Tree, root: int, left: int) -> int:
    """Take one tree out of the capacities; returns its weight, or 0 if none can be grown."""
    graph, units, count = capacities.graph, capacities.units, len(feed)
    weight: int = units[feed[root]]
    units[feed[root]] = 0
    others = left - weight
    for node in range(count):
        tree.parent[node] = -2
    tree.parent[root] = -1
    tree.order[0] = root
    size = 1
    while size < count:
        best, best_arc, best_from = 0, -1, -1
        for index in range(size):
            a = tree.order[index]
            for arc in range(graph.arc_ptr[a], graph.arc_ptr[a + 1]):
                b = graph.arc_head[arc]
                # Node `count` feeds the flow; the others are skipped if they are in the tree.
                if b == count or tree.parent[b] != -2:
                    continue
                wanted = min(weight, units[arc])
                if wanted <= best:
                    continue
                # The largest weight of this arc: the amount by which a flow from the other roots
                # and ``a`` into ``b`` exceeds the weights of the other trees.
                reset(capacities)
                capacities.residual[feed[a]] = UNLIMITED
                flow = max_flow(graph, capacities.residual, count, b, others + wanted)
                if flow - others > best:
                    best, best_arc, best_from = flow - others, arc, a
            # No arc can take more than the weight of the tree.
            if best == weight:
                break
        if best <= 0:
            return 0
        # The tree becomes lighter: its arcs and its root get the difference back.
        if best < weight:
            surplus = weight - best
            for index in range(1, size):
                units[tree.arc_of[tree.order[index]]] += surplus
            units[feed[root]] += surplus
            others += surplus
            weight = best
        b = graph.arc_head[best_arc]
        units[best_arc] -= weight
        tree.parent[b] = best_from
        tree.arc_of[b] = best_arc
        tree.order[size] = b
        size += 1
    return weight


# Fewer trees for the same all-reduce: the trees of a mix, packed anew with large weights first.
#
# Undirected spanning trees, all rooted at one rank, leave capacities in one direction per link
# that hold rooted trees of the same total (Edmonds); so does any choice of directions for what
# they left unused. Packing with the largest weight first merges trees that a linear program keeps
# apart. Repeated from the trees found so far with another root, another order and other
# directions: a walk with a fixed seed that keeps the fewest. Fabrics without switches only. One
# packing per step.


Edges = tuple[tuple[int, int], ...]
ENOUGH = 2
"""Mixes of at most this number of trees are not searched further."""
FEW = 6
"""With at most this number of trees the search stops after `_IDLE_STEPS` without a gain."""
_STEPS, _IDLE_STEPS = 256, 6
"""Packings of a search, divided by the ranks; those without a gain after which few are enough."""
_LARGEST = 2**40
"""Largest number of units for which sums of capacities are exact in 64 bits."""


def fewer_trees(fabric: Fabric, mix: Mix[UndirectedEdges]) -> list[tuple[Fraction, Edges]]:
    """Return the mix's undirected trees, or fewer trees of the same total weight."""
    scale = lcm(*(weight.denominator for weight, _ in mix.weighted))
    now = [
        (int(weight * scale), tuple((a, b) for a, b, _ in pattern.payload))
        for weight, pattern in mix.weighted
    ]
    if fabric.has_switches or mix.value * scale * fabric.num_ranks**2 > _LARGEST:
        return [(Fraction(weight, scale), edges) for weight, edges in now]
    best, last_gain, random = now, 0, np.random.default_rng(0)
    for step in range(_STEPS // fabric.num_ranks):
        if len(best) <= ENOUGH or (len(best) <= FEW and step - last_gain > _IDLE_STEPS):
            break
        found = _packed_anew(fabric.matrix * scale, now, random)
        # The linear program's own trees are a local minimum: the first steps accept anything, and
        # every fourth step accepts one tree more.
        if step < 2 or len(found) <= len(now) + (step % 4 == 0):
            now = found
        if len(now) < len(best):
            best, last_gain = now, step
    return [(Fraction(weight, scale), edges) for weight, edges in best]


def _packed_anew(
    capacity: LongArray, trees: list[tuple[int, Edges]], random: np.random.Generator
) -> list[tuple[int, Edges]]:
    """Pack trees of the same total from a random root, with unused capacity in random
    directions."""
    count = len(capacity)
    root, order = int(random.integers(count)), random.permutation(count)
    taken = np.zeros_like(capacity)
    for weight, edges in trees:
        for tail, head in edges_from(edges, root):
            taken[tail, head] += weight
    # Each pair of ranks uses its unused capacity in one direction only.
    unused = capacity - taken - taken.T
    above = np.triu(random.random((count, count)) < 0.5, 1)
    directed = above | np.tril(~above.T, -1)
    matrix = taken + np.where(directed, unused, 0)
    number = np.argsort(order)
    demand = np.zeros(count, dtype=np.int64)
    demand[number[root]] = sum(weight for weight, _ in trees)
    shuffled = np.ascontiguousarray(matrix[np.ix_(order, order)])
    return [(tree.weight, _edges(tree, order.tolist())) for tree in pack_trees(shuffled, demand)]


def _edges(tree: PackedTree, order: list[int]) -> Edges:
    return tuple((order[a], order[b]) for b, a in enumerate(tree.parent) if a >= 0)
