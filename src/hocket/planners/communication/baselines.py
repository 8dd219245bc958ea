"""Baseline schedules of collectives, as libraries have them: rings, chains, trees, one hop.

- Ring: as many link-disjoint rings as fit (NCCL, Horovod), each in both directions. Every rank is
  the root of an equal share: 2(n-1) steps of 1/n (Patarasuk and Yuan, 2009).
- Chain: as many link-disjoint Hamiltonian paths as fit, NCCL's tree inside a machine.
- Double binary tree: two trees of half the message in which no rank is inner in both (Sanders,
  Speck and Träff, 2009), NCCL's tree between machines.
- One hop: every rank sends a share to all others directly, for cliques and switches (Blink).
- Shallow tree: one tree of least latency, which wins for small messages.

The most rings or chains that fit at once come from an integer program over listed orders
(`most_orders`). An edge takes the path of a point-to-point transfer of typical size, never over a
third rank. Each function returns None where the ranks are not connected that way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np

from hocket.base.arrays import LongArray
from hocket.plan.sections.communication import Collective, Communication, Tree
from hocket.planners.communication.cheapest_trees import NEVER, CheapestPaths
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.trees import (
    Edge,
    Pairs,
    directed_tree,
    one_way,
    section_of,
    undirected_tree,
)

# The most Hamiltonian rings or chains that fit on the links at once, as NCCL uses them.
#
# All cycles (or paths) over neighbouring ranks are listed by depth-first search, and of those that
# use every link equally often one is kept. How often each is used, in both directions, is an
# integer program. Its linear relaxation bounds the count; a greedy choice that reaches this bound
# is optimal, and only where it does not, HiGHS solves the program. Exact on direct links up to
# eight ranks or so. Over switches, where any two ranks are neighbours, only the `MAX_SWITCHED`
# orders that take the least of the links are candidates.


MAX_ORDERS = 4000
MAX_SWITCHED = 200
MAX_STEPS = 120_000
"""Most steps of the depth-first search: enough for all chains of eight fully connected ranks."""
MAX_REPEATS = 5000
"""Stop after this number of consecutive orders over switches that use links as an earlier one
does."""
# Number of orders whose use of the links is counted in one NumPy call.
_BATCH = 1024
_ROUNDING = 1e-6
"""Tolerance when the LP optimum is rounded down to whole orders."""
Order = tuple[int, ...]
"""Ranks in sequence; in a ring the first follows the last."""


def most_orders(
    fabric: Fabric, paths: CheapestPaths, *, is_ring: bool
) -> list[tuple[Fraction, Order]]:
    """Return orders with whole multiplicities that fit at once; empty if there is no such order."""
    orders, usage = _distinct_orders(fabric, paths, is_ring)
    if not orders:
        return []
    capacity = np.array(fabric.capacity, dtype=np.int64)
    if fabric.has_switches and len(orders) > MAX_SWITCHED:
        # Sum of the fractions of capacity that an order needs over all links.
        least = np.argsort(usage @ (1 / capacity), kind="stable")[:MAX_SWITCHED]
        orders, usage = [orders[index] for index in least], usage[least]
    counts = _most_at_once(usage, capacity)
    chosen = [(Fraction(int(n)), order) for n, order in zip(counts, orders, strict=True) if n > 0]
    if chosen:
        return chosen
    # No whole unit fits anywhere (a bus that all ranks share): the best one alone, in a fraction.
    rates = [
        min(Fraction(int(units), int(n)) for units, n in zip(capacity, row, strict=True) if n)
        for row in usage
    ]
    best = rates.index(max(rates))
    return [(rates[best], orders[best])]


def are_neighbours(paths: CheapestPaths, a: int, b: int) -> bool:
    """True if two ranks reach each other without a third rank."""
    return bool(paths.cost[a][b] < NEVER and paths.cost[b][a] < NEVER)


def pairs_of(order: Order, *, is_ring: bool) -> list[tuple[int, int]]:
    """Return the pairs of neighbours in an order."""
    pairs = list(itertools.pairwise(order))
    return [*pairs, (order[-1], order[0])] if is_ring else pairs


def _orders(count: int, paths: CheapestPaths, is_ring: bool) -> Iterator[Order]:
    """Cycles from rank 0, or paths from each rank, each in one of its two directions."""
    near = [[b for b in range(count) if b != a and are_neighbours(paths, a, b)]
            for a in range(count)]  # fmt: skip
    steps = 0
    for start in range(1 if is_ring else count):
        stack: list[tuple[int, ...]] = [(start,)]
        while stack:
            walk = stack.pop()
            steps += 1
            if steps > MAX_STEPS:
                return
            if len(walk) == count:
                closes = not is_ring or count == 2 or walk[0] in near[walk[-1]]
                # Each order and its reverse use the same links: only one of the two is listed.
                forward = walk[1] <= walk[-1] if is_ring else walk[0] < walk[-1]
                if closes and forward:
                    yield walk
                continue
            stack += [(*walk, b) for b in reversed(near[walk[-1]]) if b not in walk]


def _distinct_orders(
    fabric: Fabric, paths: CheapestPaths, is_ring: bool
) -> tuple[list[Order], LongArray]:
    """Orders that differ in their use of the links, and [order, channel] how often each is used."""
    used_by = np.zeros((fabric.num_ranks, fabric.num_ranks, len(fabric.capacity)), dtype=np.int64)
    for a, b in itertools.permutations(range(fabric.num_ranks), 2):
        if are_neighbours(paths, a, b):
            channels = [fabric.arcs[arc].channel for arc in (*paths.path(a, b), *paths.path(b, a))]
            np.add.at(used_by[a, b], channels, 1)
    found: dict[bytes, tuple[Order, LongArray]] = {}
    repeats = 0
    listed = _orders(fabric.num_ranks, paths, is_ring)
    while batch := list(itertools.islice(listed, _BATCH)):
        ranks = np.array(batch)
        following = np.roll(ranks, -1, axis=1) if is_ring else ranks[:, 1:]
        usage = used_by[ranks[:, : following.shape[1]], following].sum(axis=1)
        known = len(found)
        for order, row in zip(batch, usage, strict=True):
            found.setdefault(row.tobytes(), (order, row))
        repeats = 0 if len(found) > known else repeats + len(batch)
        if len(found) >= MAX_ORDERS or (fabric.has_switches and repeats > MAX_REPEATS):
            break
    orders = [order for order, _ in found.values()]
    return orders, np.array([row for _, row in found.values()], dtype=np.int64)


def _most_at_once(usage: LongArray, capacity: LongArray) -> LongArray:
    """Return the weight of each order that maximises the total that fits at once."""
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp
    from scipy.sparse import csr_array

    gain = -np.ones(len(usage))
    matrix = csr_array(usage.T)
    relaxed = linprog(gain, A_ub=matrix, b_ub=capacity, method="highs")
    counts = _greedy(usage, capacity)
    # The bound is whole, so a greedy choice that reaches it needs no integer program.
    if relaxed.success and counts.sum() >= np.floor(_ROUNDING - relaxed.fun):
        return counts
    exact = milp(
        gain,
        integrality=np.ones(len(usage)),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(matrix, ub=capacity.astype(float)),
        options={"time_limit": 5.0},
    )
    return counts if exact.x is None else np.rint(exact.x).astype(np.int64)


def _greedy(usage: LongArray, capacity: LongArray) -> LongArray:
    """Repeatedly choose the order that needs the least of the remaining capacity."""
    left = capacity.copy()
    counts = np.zeros(len(usage), dtype=np.int64)
    fitting = np.flatnonzero((usage <= left).all(axis=1))
    while len(fitting):
        # A full link must not divide by zero; no fitting order uses it.
        take = fitting[np.argmin(usage[fitting] @ (1 / np.maximum(left, 1)))]
        left -= usage[take]
        counts[take] += 1
        fitting = fitting[(usage[fitting] <= left).all(axis=1)]
    return counts


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
        # Both directions of a ring have their own channels, so each carries half of the message.
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
    # Mirrored (even counts) or shifted by one (odd), leaves of the first tree are inner nodes of
    # the second.
    turn = [count - 1 - r if count % 2 == 0 else (r + 1) % count for r in range(count)]
    second = [(turn[a], turn[b]) for a, b in first]
    weighted = [(Fraction(1, 2), pairs[0][0], pairs) for pairs in (first, second)]
    return _on_trees(fabric, collective, root, "double binary tree", weighted)


def binary_tree(count: int) -> list[tuple[int, int]]:
    """(parent, child) pairs of a tree over 0 … count - 1 whose odd ranks are leaves; root first."""
    pairs = []
    for rank in range(1, count):
        # The lowest set bit is the height of a rank in the in-order numbering of the tree.
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
    """Return the collective over undirected trees (weight, root of an all-reduce, edges).

    A gather uses each tree once per rank as the root.
    """
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
