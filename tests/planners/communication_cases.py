"""Fabrics for the tests of collectives: random ones, published ones, and brute-force oracles."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations

from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_from_dict
from hocket.planners.communication.fabric import Fabric

# Two dies of a module share four links, modules one or two (the graph of sixteen MI250 dies).
MI250_LINKS = (
    (0, 1, 4), (0, 4, 2), (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 3, 4), (2, 6, 1),
    (2, 9, 1), (2, 10, 1), (3, 7, 2), (3, 11, 1), (4, 5, 4), (4, 6, 1), (5, 6, 1), (5, 7, 1),
    (6, 7, 4), (8, 9, 4), (8, 12, 2), (9, 13, 1), (10, 11, 4), (10, 14, 1), (11, 15, 2),
    (12, 13, 4), (12, 14, 1), (13, 14, 1), (13, 15, 1), (14, 15, 4),
)  # fmt: skip


def cluster_of(num_gpus: int, switches: int, links: list[tuple[str, str, float]]) -> Cluster:
    return cluster_from_dict(
        {
            "name": "case",
            "devices": [{"kind": "v100-16g", "count": num_gpus}],
            "switches": [f"sw{n}" for n in range(switches)],
            "links": [
                {"ends": [a, b], "bandwidth": gbps * 1e9, "latency": 1e-6} for a, b, gbps in links
            ],
        }
    )


def a100_boxes(boxes: int) -> Cluster:
    """Eight GPUs at an NVSwitch of 300 GB/s each, 25 GB/s of network for each."""
    gpus = 8 * boxes
    links = [(f"gpu{g}", f"sw{g // 8}", 300.0) for g in range(gpus)]
    if boxes > 1:
        links += [(f"gpu{g}", f"sw{boxes}", 25.0) for g in range(gpus)]
    return cluster_of(gpus, boxes + (boxes > 1), links)


def mi250_boxes(boxes: int) -> Cluster:
    """Sixteen dies with 50 GB/s per link, 16 GB/s of network for each."""
    links = [
        (f"gpu{16 * box + a}", f"gpu{16 * box + b}", 50.0 * count)
        for box in range(boxes)
        for a, b, count in MI250_LINKS
    ]
    if boxes > 1:
        links += [(f"gpu{g}", "sw0", 16.0) for g in range(16 * boxes)]
    return cluster_of(16 * boxes, int(boxes > 1), links)


def random_cluster(seed: int, *, switches: int = 0, gpus: int | None = None) -> Cluster:
    """A connected cluster with links of 1 to 3 GB/s."""
    chance = random.Random(seed)
    gpus = gpus or chance.randint(3, 5)
    places = [f"gpu{n}" for n in range(gpus)] + [f"sw{n}" for n in range(switches)]
    links = []
    for n in range(1, len(places)):
        links.append((places[n], places[chance.randrange(n)], float(chance.randint(1, 3))))
    for a, b in combinations(places, 2):
        if chance.random() < 0.4:
            links.append((a, b, float(chance.randint(1, 3))))
    return cluster_of(gpus, switches, links)


def brute_gather(fabric: Fabric) -> Fraction:
    """The least cut ratio, over all sets of places."""
    best = None
    for chosen in range(1, 2**fabric.num_places - 1):
        inside = [p for p in range(fabric.num_places) if chosen >> p & 1]
        ranks = sum(p < fabric.num_ranks for p in inside)
        if ranks in (0, fabric.num_ranks):
            continue
        leaving = sum(
            fabric.capacity[a.channel]
            for a in fabric.arcs
            if a.tail in inside and a.head not in inside
        )
        ratio = fabric.num_ranks * Fraction(leaving, ranks)
        best = ratio if best is None else min(best, ratio)
    assert best is not None
    return best


def brute_broadcast(fabric: Fabric, root: int) -> int:
    """The least cut that separates the root from a rank."""
    best = 10**18
    for chosen in range(1, 2**fabric.num_places - 1):
        inside = [p for p in range(fabric.num_places) if chosen >> p & 1]
        if root not in inside or all(r in inside for r in range(fabric.num_ranks)):
            continue
        leaving = sum(
            fabric.capacity[a.channel]
            for a in fabric.arcs
            if a.tail in inside and a.head not in inside
        )
        best = min(best, leaving)
    return best


def brute_strength(fabric: Fabric) -> Fraction:
    """The least (links between parts) / (parts - 1), over all partitions."""

    def partitions(items: list[int]):
        if not items:
            yield []
            return
        first, *rest = items
        for parts in partitions(rest):
            yield [[first], *parts]
            for index in range(len(parts)):
                yield [*parts[:index], [first, *parts[index]], *parts[index + 1 :]]

    ratios = []
    for parts in partitions(list(range(fabric.num_places))):
        if len(parts) > 1:
            part_of = {place: n for n, part in enumerate(parts) for place in part}
            between = sum(
                fabric.capacity[a.channel]
                for a in fabric.arcs
                if a.tail < a.head and part_of[a.tail] != part_of[a.head]
            )
            ratios.append(Fraction(between, len(parts) - 1))
    return min(ratios)
