"""Plain collectives that libraries use, exactly, as trees to compare with: what they share.

Their edges take the path between two ranks that a transfer would take (fewest seconds for a typical
message), never over a third rank. A pair without such a path cannot be neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hocket.plan.sections.communication import Collective, Tree
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.paths import NEVER, CheapestPaths
from hocket.planners.communication.sends import RoutedTree, both_directions

_TYPICAL_BYTES = 16 * 2**20


def usual_paths(fabric: Fabric) -> CheapestPaths:
    """Path of a point-to-point transfer between each pair of ranks."""
    bps = [fabric.capacity[arc.channel] * fabric.unit_bps for arc in fabric.arcs]
    return CheapestPaths(
        fabric,
        [arc.latency_s + _TYPICAL_BYTES / rate for arc, rate in zip(fabric.arcs, bps, strict=True)],
    )


def are_neighbours(paths: CheapestPaths, a: int, b: int) -> bool:
    """True if two ranks reach each other without a third."""
    return bool(paths.cost[a][b] < NEVER and paths.cost[b][a] < NEVER)


def trees_of(
    fabric: Fabric, collective: Collective, root: int, paths: CheapestPaths,
    weighted: Sequence[tuple[Fraction, int, Sequence[tuple[int, int]]]],
) -> list[Tree]:  # fmt: skip
    """Trees of a collective from undirected ones (weight, root of an all-reduce, edges)."""
    found: list[Tree] = []
    for weight, own_root, pairs in weighted:
        edges = tuple((a, b, paths.path(a, b)) for a, b in pairs)
        if collective == "allreduce":
            found.append(both_directions(fabric, RoutedTree(weight, own_root, edges)))
            continue
        is_gather = collective in ("allgather", "reducescatter")
        part = weight / fabric.num_ranks if is_gather else weight
        for rank in range(fabric.num_ranks) if is_gather else (root,):
            found.append(_directed(fabric, collective, RoutedTree(part, rank, edges)))
    return found


def _directed(fabric: Fabric, collective: Collective, tree: RoutedTree) -> Tree:
    whole = both_directions(fabric, tree)
    if collective in ("reduce", "reducescatter"):
        return Tree(whole.root, whole.share, reduce=whole.reduce)
    return Tree(whole.root, whole.share, broadcast=whole.broadcast)
