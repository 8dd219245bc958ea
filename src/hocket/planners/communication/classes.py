"""Allocation classes of a machine: device sets whose links differ only in names are planned once.

Blink compares NCCL with its own trees on one set of GPUs per class (46 classes of a DGX-1V, 14 of a
DGX-1P). Two sets are of one class if their links have the same canonical form: colours of places
are refined by the colours around them until nothing changes. If a colour still holds several
places, each of them in turn gets a colour of its own and refinement continues; the smallest matrix
of all these choices is the form (McKay, 1981, in its simplest version). Of places that can be
swapped freely one is tried. After `MAX_LOOKS` the form is only a good guess: a class may then
appear twice. O(places²) per refinement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.cluster import Cluster
from hocket.planners.communication.fabric import Fabric, fabric_of

MAX_LOOKS = 200_000
"""Most pairs of places compared in all refinements together: a second or two."""

Relations = list[list[tuple[int, ...]]]
"""[from][to]: sorted capacities of the arcs; those of shared channels have a negative sign."""


def connected_classes(cluster: Cluster, sizes: Sequence[int]) -> list[tuple[Fabric, int]]:
    """Return one fabric per class of connected device sets, and the number of sets in the class."""
    first: dict[tuple[object, ...], Fabric] = {}
    count: dict[tuple[object, ...], int] = defaultdict(int)
    for size in sizes:
        for ranks in combinations(cluster.device_names, size):
            try:
                fabric = fabric_of(cluster, ranks, links="peer")
            except NoFeasiblePlanError:
                continue
            # Capacities are relative to the unit: a set with double links only is another class.
            key = (fabric.unit_bps, *canonical_form(fabric))
            first.setdefault(key, fabric)
            count[key] += 1
    return [(fabric, count[key]) for key, fabric in first.items()]


def canonical_form(fabric: Fabric) -> tuple[object, ...]:
    """Return a key that is the same for every renaming of a fabric, up to the unit of its rates."""
    around = _relations(fabric)
    best: tuple[object, ...] | None = None
    looks = 0
    # Ranks and forwarding places start with different colours, as they are never exchanged.
    stack = [_refined(around, [int(p >= fabric.num_ranks) for p in range(fabric.num_places)])]
    while stack and (best is None or looks < MAX_LOOKS):
        colour = stack.pop()
        looks += len(colour) ** 2
        cell = _first_cell(colour)
        if not cell:
            order = sorted(range(len(colour)), key=colour.__getitem__)
            key = tuple(tuple(around[a][b] for b in order) for a in order)
            best = key if best is None else min(best, key)
            continue
        for place in _not_interchangeable(around, cell):
            # Doubling makes space for one colour below the cell's own.
            apart = [2 * c for c in colour]
            apart[place] -= 1
            stack.append(_refined(around, apart))
    assert best is not None
    return (fabric.num_ranks, *best)


def _relations(fabric: Fabric) -> Relations:
    shared: dict[int, int] = defaultdict(int)
    for arc in fabric.arcs:
        shared[arc.channel] += 1
    around: list[list[list[int]]] = [[[] for _ in fabric.places] for _ in fabric.places]
    for arc in fabric.arcs:
        units = fabric.capacity[arc.channel]
        # A negative sign marks shared channels: these are not equal to links of the same rate.
        around[arc.tail][arc.head].append(units if shared[arc.channel] == 1 else -units)
    return [[tuple(sorted(cell)) for cell in row] for row in around]


def _refined(around: Relations, colour: list[int]) -> list[int]:
    """Split colours by the colours and capacities around each place until nothing changes."""
    places = range(len(colour))
    while True:
        seen = [
            (colour[a], sorted((colour[b], around[a][b], around[b][a]) for b in places if b != a))
            for a in places
        ]
        ranks = sorted(places, key=lambda a: seen[a])
        fresh, number = [0] * len(colour), 0
        for before, a in zip([ranks[0], *ranks], ranks, strict=False):
            number += seen[before] != seen[a]
            fresh[a] = number
        if len(set(fresh)) == len(set(colour)):
            return fresh
        colour = fresh


def _first_cell(colour: list[int]) -> list[int]:
    """Return the places of the lowest colour that several places have; empty if all colours
    differ."""
    cells: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(colour):
        cells[value].append(place)
    return next((cell for _, cell in sorted(cells.items()) if len(cell) > 1), [])


def _not_interchangeable(around: Relations, cell: list[int]) -> Iterator[int]:
    """Yield one place of a cell for each set of places that can be swapped without a change."""
    kept: list[int] = []
    for place in cell:
        if not any(_are_twins(around, place, other) for other in kept):
            kept.append(place)
            yield place


def _are_twins(around: Relations, a: int, b: int) -> bool:
    """True if swapping two places changes no relation."""
    others = [p for p in range(len(around)) if p not in (a, b)]
    return around[a][b] == around[b][a] and all(
        around[a][p] == around[b][p] and around[p][a] == around[p][b] for p in others
    )
