"""Fewer trees for the same all-reduce: the trees of a mix, packed anew with large weights first.

Undirected spanning trees, all hung up at one root, leave capacities in one direction per link that
hold rooted trees of the same total (Edmonds); so does any choice of directions for what they
left unused. Packing with the largest weight first merges trees that a linear program keeps apart.
Repeated from the trees found so far with another root, another order and other directions: a walk
with a fixed seed that keeps the fewest. Fabrics without switches only. One packing per step.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.communication.columns import Mix
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.packing import PackedTree, pack_trees
from hocket.planners.communication.spanning import UndirectedEdges
from hocket.planners.communication.trees import hung_up

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
        # The program's own trees are many but hard to leave: the first steps go anywhere, and
        # every fourth may go up by one.
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
        for tail, head in hung_up(edges, root):
            taken[tail, head] += weight
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
