"""Clusters: a unit with some of the units around it, to be moved as one.

Where transfers take long, moving one unit costs more than it gains, and only moving it together
with what it exchanges tensors with shows whether another device would be better.
"""

from __future__ import annotations

import numpy as np

from hocket.graph.graph import Graph
from hocket.planners.placement.search.units import SearchUnits


def neighbours(graph: Graph, units: SearchUnits) -> list[list[int]]:
    """Units that exchange tensors with each unit, ascending."""
    src, dst = (units.unit_of[ends].tolist() for ends in graph.edges)
    near: list[set[int]] = [set() for _ in range(units.num_units)]
    for one, other in zip(src, dst, strict=True):
        if one != other:
            near[one].add(other)
            near[other].add(one)
    return [sorted(found) for found in near]


def cluster(near: list[list[int]], start: int, random: np.random.Generator) -> list[int]:
    """A unit and connected units around it, as many as the logarithm of a random size says."""
    size = int(2 ** random.uniform(1, np.log2(max(len(near), 3))))
    picks = random.random(size).tolist()
    chosen, border = [start], list(near[start])
    seen = {start, *border}
    while border and len(chosen) < size:
        unit = border.pop(int(picks[len(chosen)] * len(border)))
        chosen.append(unit)
        fresh = [other for other in near[unit] if other not in seen]
        seen.update(fresh)
        border += fresh
    return chosen
