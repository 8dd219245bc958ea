"""Trees as Blink packs them, for comparison: multiplicative weights, then few whole trees.

Wang et al., MLSys 2020, after Garg and Könemann (1998): every link has a length that grows with
what it carries; the shortest tree takes as much as its narrowest link allows, until the lengths add
up to 1. Scaled down, the flow is within a few epsilon of the optimum, spread over many trees. Then
an integer program over those trees takes whole units of them. O(links log links / epsilon²) trees.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import log

import numpy as np

from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.arborescence import cheapest_arborescence
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.sends import RoutedTree, both_ways, one_way, section_of
from hocket.planners.communication.ways import Path, Ways

Edges = tuple[tuple[int, int, Path], ...]


def many_trees(fabric: Fabric, root: int, *, epsilon: float = 0.1) -> dict[Edges, float]:
    """Weights of the trees that a broadcast from the root is spread over, in units."""
    count = len(fabric.capacity)
    start = (1 + epsilon) * ((1 + epsilon) * count) ** (-1 / epsilon)
    length = [start / units for units in fabric.capacity]
    weights: dict[Edges, float] = defaultdict(float)
    while sum(y * c for y, c in zip(length, fabric.capacity, strict=True)) < 1:
        edges = _shortest_tree(fabric, root, length)
        usage: dict[int, int] = defaultdict(int)
        for _, _, path in edges:
            for arc in path:
                usage[fabric.arcs[arc].channel] += 1
        flow = min(fabric.capacity[channel] / times for channel, times in usage.items())
        for channel, times in usage.items():
            length[channel] *= 1 + epsilon * flow * times / fabric.capacity[channel]
        weights[edges] += flow
    scale = log((1 + epsilon) / start) / log(1 + epsilon)
    return {edges: weight / scale for edges, weight in weights.items()}


def _shortest_tree(fabric: Fabric, root: int, length: list[float]) -> Edges:
    ways = Ways(fabric, [length[arc.channel] for arc in fabric.arcs])
    count = fabric.num_ranks
    parent = cheapest_arborescence([row[:count] for row in ways.cost[:count]], root)
    return tuple((a, b, ways.path(a, b)) for b, a in enumerate(parent) if a >= 0)


def blink(
    fabric: Fabric, collective: Collective, root: int, *, epsilon: float = 0.1
) -> Communication | None:
    """Whole units of the trees that multiplicative weights find; None where Blink has no trees.

    An all-reduce sends over each tree towards the root and away from it.
    """
    if collective not in ("broadcast", "reduce", "allreduce") or not fabric.is_symmetric:
        return None
    is_reduce = collective == "reduce"
    shown = fabric.turned_around() if is_reduce else fabric
    chosen = _whole_trees(shown, list(many_trees(shown, root, epsilon=epsilon)))
    routed = [RoutedTree(Fraction(weight), root, edges) for edges, weight in chosen]
    if collective == "allreduce":
        trees = [both_ways(fabric, tree) for tree in routed]
    else:
        trees = [one_way(fabric, tree, is_reduce=is_reduce) for tree in routed]
    return section_of(fabric, collective, root, "blink", trees)


def _whole_trees(fabric: Fabric, trees: list[Edges]) -> list[tuple[Edges, int]]:
    """Whole units of each tree, the most in all (integer program, HiGHS); one where none fits."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    load = np.zeros((len(fabric.capacity), len(trees)))
    for column, edges in enumerate(trees):
        for _, _, path in edges:
            for arc in path:
                load[fabric.arcs[arc].channel, column] += 1
    capacity = np.array(fabric.capacity, dtype=float)
    ones = np.ones(len(trees))
    options = {"time_limit": 10.0}
    most = milp(
        -ones, integrality=ones, bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(load, ub=capacity), options=options,
    )  # fmt: skip
    if most.x is None or -most.fun < 1:
        return [(trees[0], 1)]
    return [
        (edges, round(units)) for edges, units in zip(trees, most.x, strict=True) if units > 0.5
    ]
