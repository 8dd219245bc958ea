"""The canonical form of a fabric: two that differ only in names have the same.

Colours of places are refined by the colours around them until nothing changes. Where a colour still
holds several places, each of them in turn is given a colour of its own and refinement goes on; the
smallest matrix of all these choices is the form (McKay, 1981, in its simplest shape). Places that
can be swapped freely are tried once. After `MAX_LOOKS` the form is only a good guess: a plan may
then be computed twice, but is never wrong. O(places²) per refinement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.cluster import Cluster
from hocket.planners.communication.fabric import Arc, Fabric, fabric_of

MAX_LOOKS = 200_000
"""Pairs of places that are looked at, all refinements together: a tenth of a second or two."""


@dataclass(frozen=True)
class Form:
    """The order of the places that makes a fabric canonical, and what it then looks like."""

    order: tuple[int, ...]
    """order[new] = old."""
    key: tuple[object, ...]


def canonical_form(fabric: Fabric, root: int | None = None) -> Form:
    """The same key for every renaming of a fabric (with a root), up to the unit of its rates."""
    around = _relations(fabric)
    kind = [int(place >= fabric.num_ranks) for place in range(fabric.num_places)]
    if root is not None:
        kind[root] = -1
    best: tuple[tuple[object, ...], tuple[int, ...]] | None = None
    looks = 0
    stack = [_refined(around, kind)]
    while stack and (best is None or looks < MAX_LOOKS):
        colour = stack.pop()
        looks += len(colour) ** 2
        cell = _first_cell(colour)
        if not cell:
            order = tuple(sorted(range(len(colour)), key=colour.__getitem__))
            key = tuple(tuple(around[a][b] for b in order) for a in order)
            if best is None or key < best[0]:
                best = (key, order)
            continue
        for place in _not_interchangeable(around, cell):
            apart = [2 * c for c in colour]
            apart[place] -= 1
            stack.append(_refined(around, apart))
    assert best is not None
    return Form(best[1], (fabric.num_ranks, *best[0]))


def renamed(fabric: Fabric, form: Form) -> tuple[Fabric, dict[str, str], dict[str, str]]:
    """The fabric in canonical order under plain names, and what places and links were called."""
    new_of = {old: new for new, old in enumerate(form.order)}
    listed = sorted(
        range(len(fabric.arcs)),
        key=lambda index: (
            new_of[fabric.arcs[index].tail],
            new_of[fabric.arcs[index].head],
            fabric.capacity[fabric.arcs[index].channel],
            fabric.arcs[index].link,
        ),
    )
    links: dict[str, str] = {}
    channels: dict[int, int] = {}
    arcs = []
    for index in listed:
        arc = fabric.arcs[index]
        link = links.setdefault(arc.link, f"link{len(links)}")
        number = channels.setdefault(arc.channel, len(channels))
        arcs.append(Arc(new_of[arc.tail], new_of[arc.head], number, link, arc.latency_s))
    capacity = tuple(fabric.capacity[channel] for channel in channels)
    places = tuple(f"place{new}" for new in range(fabric.num_places))
    plain = Fabric(places, fabric.num_ranks, tuple(arcs), capacity, 1, fabric.is_peer_only)
    place_names = {places[new]: fabric.places[old] for old, new in new_of.items()}
    return plain, place_names, {new: old for old, new in links.items()}


def connected_classes(cluster: Cluster, sizes: Sequence[int]) -> list[tuple[Fabric, int]]:
    """One fabric per class of connected sets of devices, and how many sets are alike."""
    first: dict[tuple[object, ...], Fabric] = {}
    count: dict[tuple[object, ...], int] = defaultdict(int)
    for size in sizes:
        for ranks in combinations(cluster.device_names, size):
            try:
                fabric = fabric_of(cluster, ranks, links="peer")
            except NoFeasiblePlanError:
                continue
            # Units differ where all links of a set are double: the class is that of the rates.
            key = (fabric.unit_bps, *canonical_form(fabric).key)
            first.setdefault(key, fabric)
            count[key] += 1
    return [(fabric, count[key]) for key, fabric in first.items()]


def _relations(fabric: Fabric) -> list[list[tuple[int, ...]]]:
    """[from][to]: capacities of the arcs; shared channels have a negative sign."""
    shared: dict[int, int] = defaultdict(int)
    for arc in fabric.arcs:
        shared[arc.channel] += 1
    around: list[list[list[int]]] = [[[] for _ in fabric.places] for _ in fabric.places]
    for arc in fabric.arcs:
        units = fabric.capacity[arc.channel]
        around[arc.tail][arc.head].append(units if shared[arc.channel] == 1 else -units)
    return [[tuple(sorted(cell)) for cell in row] for row in around]


def _refined(around: list[list[tuple[int, ...]]], colour: list[int]) -> list[int]:
    places = range(len(colour))
    while True:
        seen = [
            (colour[a], sorted((colour[b], around[a][b], around[b][a]) for b in places if b != a))
            for a in places
        ]
        ranks = sorted(range(len(colour)), key=lambda a: seen[a])
        fresh, number = [0] * len(colour), 0
        for before, a in zip([ranks[0], *ranks], ranks, strict=False):
            number += seen[before] != seen[a]
            fresh[a] = number
        if len(set(fresh)) == len(set(colour)):
            return fresh
        colour = fresh


def _first_cell(colour: list[int]) -> list[int]:
    cells: dict[int, list[int]] = defaultdict(list)
    for place, value in enumerate(colour):
        cells[value].append(place)
    return next((cell for _, cell in sorted(cells.items()) if len(cell) > 1), [])


def _not_interchangeable(around: list[list[tuple[int, ...]]], cell: list[int]) -> Iterator[int]:
    """Places of a cell of which no two can be swapped without a change."""
    kept: list[int] = []
    for place in cell:
        if not any(_are_twins(around, place, other) for other in kept):
            kept.append(place)
            yield place


def _are_twins(around: list[list[tuple[int, ...]]], a: int, b: int) -> bool:
    others = [p for p in range(len(around)) if p not in (a, b)]
    return around[a][b] == around[b][a] and all(
        around[a][p] == around[b][p] and around[p][a] == around[p][b] for p in others
    )
