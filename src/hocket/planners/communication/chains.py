"""Chains, double binary trees, stars and the shallowest tree: plain trees to compare with.

Chains: as many link-disjoint Hamiltonian paths as fit, NCCL's "tree" inside a machine. Double
binary trees: two trees of half the message in which no rank is inner in both (Sanders, Speck and
Träff, 2009), NCCL's tree between machines. One hop: every rank is the root of a share that goes to
all others directly, for cliques and switches. Shallow: one tree with the least latency, which wins
for small messages.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

from hocket.plan.sections.communication import Collective, Communication, Tree
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.orders import Order, most_orders, pairs_of
from hocket.planners.communication.paths import NEVER, CheapestPaths
from hocket.planners.communication.plain import are_neighbours, trees_of, usual_paths
from hocket.planners.communication.sends import RoutedTree, one_direction, section_of

# Ring collectives on as many link-disjoint rings as fit: the baseline of NCCL and Horovod.
#
# Each ring is used in both directions. Every rank is the root of an equal share, which is sent once
# around to be reduced and once more to be broadcast: 2(n-1) steps of 1/n of a ring's part
# (Patarasuk and Yuan, 2009).


def ring(
    fabric: Fabric, collective: Collective, root: int, *, algorithm: str = "ring"
) -> Communication | None:
    """The collective on the most rings; None where the ranks form no ring."""
    paths = usual_paths(fabric)
    trees: list[Tree] = []
    for weight, order in most_orders(fabric, paths, is_ring=True):
        for direction in (order, order[::-1]):
            trees += _trees(fabric, collective, root, paths, weight / 2, direction)
    return section_of(fabric, collective, root, algorithm, trees) if trees else None


def ring_in_order(
    fabric: Fabric, collective: Collective, root: int, *, algorithm: str
) -> Communication:
    """One ring over the ranks as they are numbered: what is left where no better ring exists."""
    paths = usual_paths(fabric)
    order = tuple(range(fabric.num_ranks))
    trees = _trees(fabric, collective, root, paths, Fraction(1), order)
    return section_of(fabric, collective, root, algorithm, trees)


def _trees(
    fabric: Fabric,
    collective: Collective,
    root: int,
    paths: CheapestPaths,
    weight: Fraction,
    order: Order,
) -> list[Tree]:
    """The trees of one direction of a ring."""
    if collective in ("broadcast", "reduce"):
        return [_tree(fabric, collective, paths, weight, _from(order, root))]
    part = weight / len(order)
    return [_tree(fabric, collective, paths, part, _from(order, rank)) for rank in order]


def _from(order: Order, rank: int) -> Order:
    at = order.index(rank)
    return order[at:] + order[:at]


def _tree(
    fabric: Fabric, collective: Collective, paths: CheapestPaths, weight: Fraction, order: Order
) -> Tree:
    """Around the ring to its first rank, and around from there once more."""
    root = order[0]
    spread = tuple((a, b, paths.path(a, b)) for a, b in itertools.pairwise(order))
    last = (*order[1:], root)
    collect = tuple((a, b, paths.path(a, b)) for a, b in itertools.pairwise(last))
    into = one_direction(fabric, RoutedTree(weight, root, collect), is_reduce=True, is_turned=True)
    out = one_direction(fabric, RoutedTree(weight, root, spread), is_reduce=False)
    return Tree(
        into.root,
        weight,
        reduce=into.reduce if collective not in ("broadcast", "allgather") else (),
        broadcast=out.broadcast if collective not in ("reduce", "reducescatter") else (),
    )


Pairs = list[tuple[int, int]]


def chain(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """The collective on the most chains; None where no path passes every rank once."""
    paths = usual_paths(fabric)
    orders = most_orders(fabric, paths, is_ring=False)
    weighted = [(weight, order[0], pairs_of(order, is_ring=False)) for weight, order in orders]
    trees = trees_of(fabric, collective, root, paths, weighted)
    return section_of(fabric, collective, root, "chain", trees) if trees else None


def double_binary_tree(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """The collective on two complementary binary trees; None where neighbours have no path."""
    paths = usual_paths(fabric)
    count = fabric.num_ranks
    first = binary_tree(count)
    # Mirrored or shifted by one, leaves of the first are inner nodes of the second.
    turn = [count - 1 - r if count % 2 == 0 else (r + 1) % count for r in range(count)]
    second = [(turn[a], turn[b]) for a, b in first]
    if not all(are_neighbours(paths, a, b) for a, b in (*first, *second)):
        return None
    weighted = [(Fraction(1, 2), pairs[0][0], pairs) for pairs in (first, second)]
    trees = trees_of(fabric, collective, root, paths, weighted)
    return section_of(fabric, collective, root, "double binary tree", trees)


def binary_tree(count: int) -> Pairs:
    """(parent, child) pairs of a tree over 0 … count - 1 whose odd ranks are leaves; root first."""
    pairs: Pairs = []
    for rank in range(1, count):
        lowest = rank & -rank
        parent = (rank ^ lowest) | (lowest << 1)
        pairs.append((rank ^ lowest if parent >= count else parent, rank))
    root = next(a for a, _ in pairs if all(b != a for _, b in pairs))
    return sorted(pairs, key=lambda pair: pair[0] != root)


def one_hop(fabric: Fabric, collective: Collective, root: int) -> Communication | None:
    """Every share directly from its root to all others; None where a pair has no path."""
    paths = usual_paths(fabric)
    ranks = range(fabric.num_ranks)
    if not all(are_neighbours(paths, a, b) for a in ranks for b in ranks if a != b):
        return None
    stars = {rank: [(rank, other) for other in ranks if other != rank] for rank in ranks}
    part = Fraction(1, fabric.num_ranks)
    if collective in ("broadcast", "reduce"):
        trees = trees_of(fabric, collective, root, paths, [(Fraction(1), root, stars[root])])
    elif collective == "allreduce":
        weighted = [(part, rank, stars[rank]) for rank in ranks]
        trees = trees_of(fabric, collective, root, paths, weighted)
    else:
        trees = []
        for rank in ranks:
            kind: Collective = "broadcast" if collective == "allgather" else "reduce"
            trees += trees_of(fabric, kind, rank, paths, [(part, rank, stars[rank])])
    return section_of(fabric, collective, root, "one hop", trees)


def shallow_tree(fabric: Fabric, collective: Collective, root: int) -> Communication:
    """One tree of shortest paths by latency, at the rank from which the farthest is nearest."""
    paths = usual_paths(fabric)
    any_root = collective not in ("broadcast", "reduce")
    roots = range(fabric.num_ranks) if any_root else (root,)
    found = {rank: _shortest(fabric, rank) for rank in roots}
    best = min(found, key=lambda rank: (found[rank][0], rank))
    weighted = [(Fraction(1), best, found[best][1])]
    trees = trees_of(fabric, collective, root, paths, weighted)
    return section_of(fabric, collective, root, "shallow tree", trees)


def _shortest(fabric: Fabric, root: int) -> tuple[float, Pairs]:
    """Latency to the farthest rank, and the tree of shortest paths (Dijkstra over ranks)."""
    paths = usual_paths(fabric)
    count = fabric.num_ranks
    delay = [[sum(fabric.arcs[arc].latency_s for arc in paths.path(a, b)) + 1e-9
              if a != b and are_neighbours(paths, a, b) else NEVER
              for b in range(count)] for a in range(count)]  # fmt: skip
    near, parent, left = list(delay[root]), [root] * count, set(range(count)) - {root}
    pairs: Pairs = []
    farthest = 0.0
    while left:
        rank = min(left, key=lambda other: (near[other], other))
        left.remove(rank)
        pairs.append((parent[rank], rank))
        farthest = max(farthest, near[rank])
        for other in left:
            if near[rank] + delay[rank][other] < near[other]:
                near[other], parent[other] = near[rank] + delay[rank][other], rank
    return farthest, pairs
