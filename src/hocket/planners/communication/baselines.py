"""Baseline schedules of collectives, as libraries have them: rings, chains, trees, one hop.

- Ring: as many link-disjoint rings as fit (NCCL, Horovod), each in both directions. Every rank is
  the root of an equal share: 2(n-1) steps of 1/n (Patarasuk and Yuan, 2009).
- Chain: as many link-disjoint Hamiltonian paths as fit, NCCL's tree inside a machine.
- Double binary tree: two trees of half the message in which no rank is inner in both (Sanders,
  Speck and Träff, 2009), NCCL's tree between machines.
- One hop: every rank sends a share to all others directly, for cliques and switches (Blink).
- Shallow tree: one tree of least latency, which wins for small messages.

An edge takes the path of a point-to-point transfer of typical size, never over a third rank. Each
function returns None where the ranks are not connected that way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np

from hocket.plan.sections.communication import Collective, Communication, Tree
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.orders import Order, are_neighbours, most_orders, pairs_of
from hocket.planners.communication.paths import CheapestPaths
from hocket.planners.communication.trees import (
    Edge,
    Pairs,
    directed_tree,
    one_way,
    section_of,
    undirected_tree,
)

_TYPICAL_BYTES = 16 * 2**20


def usual_paths(fabric: Fabric) -> CheapestPaths:
    """Return the path of a point-to-point transfer of typical size between each pair of ranks."""
    seconds = [
        arc.latency_s + _TYPICAL_BYTES / (fabric.capacity[arc.channel] * fabric.unit_bps)
        for arc in fabric.arcs
    ]
    return CheapestPaths(fabric, seconds)


def baselines(fabric: Fabric, collective: Collective, root: int) -> Iterator[Communication]:
    """Yield all baselines that exist on a fabric."""
    for make in (ring, chain, double_binary_tree, one_hop, shallow_tree):
        section = make(fabric, collective, root)
        if section is not None:
            yield section


# ── rings ────────────────────────────────────────────────────────────────────────────────────────


def ring(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """The collective on the most link-disjoint rings."""
    paths = usual_paths(fabric)
    trees = [
        tree
        for weight, order in most_orders(fabric, paths, is_ring=True)
        for direction in (order, order[::-1])
        for tree in _ring_trees(fabric, collective, root, paths, weight / 2, direction)
    ]
    return section_of(fabric, collective, root, "ring", trees) if trees else None


def ring_in_order(
    fabric: Fabric, collective: Collective, root: int, *, algorithm: str
) -> Communication:
    """One ring over the ranks as they are numbered, for fabrics without a link-disjoint ring."""
    order = tuple(range(fabric.num_ranks))
    trees = _ring_trees(fabric, collective, root, usual_paths(fabric), Fraction(1), order)
    return section_of(fabric, collective, root, algorithm, trees)


def _ring_trees(
    fabric: Fabric, collective: Collective, root: int, paths: CheapestPaths, weight: Fraction,
    order: Order,
) -> Iterator[Tree]:  # fmt: skip
    """Trees of one direction of a ring: around it to the root, and once more from there."""
    roots = _roots(fabric, collective, root)
    for own_root in roots:
        at = order.index(own_root)
        turned = order[at:] + order[:at]
        tree = directed_tree(
            fabric, weight / len(roots), own_root,
            towards=_edges(paths, pairwise((*turned[1:], own_root))),
            away=_edges(paths, pairwise(turned)),
        )  # fmt: skip
        yield one_way(collective, tree)


def _roots(fabric: Fabric, collective: Collective, root: int) -> Sequence[int]:
    """Return the root, or all ranks if each is the root of an equal shard."""
    return (root,) if collective in ("broadcast", "reduce") else range(fabric.num_ranks)


def _edges(paths: CheapestPaths, pairs: Iterator[tuple[int, int]] | Pairs) -> list[Edge]:
    return [(a, b, paths.path(a, b)) for a, b in pairs]


# ── trees ────────────────────────────────────────────────────────────────────────────────────────


def chain(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """The collective on the most link-disjoint chains."""
    orders = most_orders(fabric, usual_paths(fabric), is_ring=False)
    weighted = [(weight, order[0], pairs_of(order, is_ring=False)) for weight, order in orders]
    return _on_trees(fabric, collective, root, "chain", weighted)


def double_binary_tree(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """The collective on two complementary binary trees."""
    count = fabric.num_ranks
    first = binary_tree(count)
    # Mirrored or shifted by one, leaves of the first are inner nodes of the second.
    turn = [count - 1 - r if count % 2 == 0 else (r + 1) % count for r in range(count)]
    second = [(turn[a], turn[b]) for a, b in first]
    weighted = [(Fraction(1, 2), pairs[0][0], pairs) for pairs in (first, second)]
    return _on_trees(fabric, collective, root, "double binary tree", weighted)


def binary_tree(count: int) -> list[tuple[int, int]]:
    """(parent, child) pairs of a tree over 0 … count - 1 whose odd ranks are leaves; root first."""
    pairs = []
    for rank in range(1, count):
        lowest = rank & -rank
        parent = (rank ^ lowest) | (lowest << 1)
        pairs.append((rank ^ lowest if parent >= count else parent, rank))
    root = next(a for a, _ in pairs if all(b != a for _, b in pairs))
    return sorted(pairs, key=lambda pair: pair[0] != root)


def one_hop(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """Send every shard directly from its root to all others."""
    paths, ranks = usual_paths(fabric), range(fabric.num_ranks)
    if not all(are_neighbours(paths, a, b) for a in ranks for b in ranks if a != b):
        return None
    tree = partial(undirected_tree, fabric, collective, Fraction(1))
    trees = [
        tree(rank, _edges(paths, [(rank, other) for other in ranks if other != rank]))
        for rank in _roots(fabric, collective, root)
    ]
    return section_of(fabric, collective, root, "one hop", trees)


def shallow_tree(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """One tree of lowest-latency paths, rooted at the rank with the least latency to its farthest
    rank."""
    from scipy.sparse.csgraph import shortest_path

    paths, ranks = usual_paths(fabric), range(fabric.num_ranks)
    delay_ns = np.full((fabric.num_ranks, fabric.num_ranks), np.inf)
    for a in ranks:
        for b in ranks:
            if a != b and are_neighbours(paths, a, b):
                # SciPy takes values near 0 for missing edges, hence nanoseconds and the 1.
                latency_s = sum(fabric.arcs[arc].latency_s for arc in paths.path(a, b))
                delay_ns[a, b] = 1e9 * latency_s + 1
    near_ns, parent = shortest_path(delay_ns, return_predecessors=True)
    roots = ranks if collective not in ("broadcast", "reduce") else (root,)
    best = min(roots, key=lambda rank: float(near_ns[rank].max()))
    pairs = [(int(parent[best, rank]), rank) for rank in ranks if rank != best]
    return _on_trees(fabric, collective, root, "shallow tree", [(Fraction(1), best, pairs)])


def _on_trees(
    fabric: Fabric, collective: Collective, root: int, algorithm: str,
    weighted: Sequence[tuple[Fraction, int, Pairs]],
) -> Communication | None:  # fmt: skip
    """The collective over undirected trees (weight, root of an all-reduce, edges). A gather takes
    each tree once per rank as the root."""
    paths, trees = usual_paths(fabric), list[Tree]()
    for weight, own_root, pairs in weighted:
        if not all(are_neighbours(paths, a, b) for a, b in pairs):
            return None
        roots = (own_root,) if collective == "allreduce" else _roots(fabric, collective, root)
        edges = _edges(paths, pairs)
        trees += [
            undirected_tree(fabric, collective, weight / len(roots), each, edges) for each in roots
        ]
    return section_of(fabric, collective, root, algorithm, trees) if trees else None
