"""Trees of a communication section, built from weighted edges over the arcs of a fabric.

Sends are listed in an order that can be executed: nearest first away from the root, farthest first
towards it. A tree of an all-reduce may have any root, so it gets its centre, from which the
farthest rank is the fewest steps away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from hocket.plan.sections.communication import Collective, Communication, Send, Tree
from hocket.planners.communication.cheapest_trees import Path
from hocket.planners.communication.fabric import Fabric

Edge = tuple[int, int, Path]
"""Two ranks, and the arcs from the first to the second."""
Pairs = Sequence[tuple[int, int]]


def section_of(
    fabric: Fabric, collective: Collective, root: int, algorithm: str, trees: Iterable[Tree]
) -> Communication:
    """Return the section of weighted trees: weights become fractions, equal trees are merged."""
    weights: dict[Tree, Fraction] = defaultdict(Fraction)
    for tree in trees:
        weights[replace(tree, share=Fraction(0))] += tree.share
    total = sum(weights.values())
    return Communication(
        collective=collective,
        algorithm=algorithm,
        ranks=fabric.places[: fabric.num_ranks],
        root=fabric.places[root],
        trees=tuple(replace(tree, share=weight / total) for tree, weight in weights.items()),
    )


def directed_tree(
    fabric: Fabric, weight: Fraction, root: int,
    *, towards: Iterable[Edge] = (), away: Iterable[Edge] = (),
) -> Tree:  # fmt: skip
    """Build a tree from edges that lead towards its root (reduce) and away from it (broadcast)."""
    down = {(a, b): path for a, b, path in away}
    up = {(b, a): path for a, b, path in towards}
    return Tree(
        fabric.places[root],
        # Weights become fractions of the message in `section_of`.
        weight,
        # Reversed, so that the farthest ranks send first.
        reduce=_sends(fabric, [(b, a, up[a, b]) for a, b in reversed(edges_from(list(up), root))]),
        broadcast=_sends(fabric, [(a, b, down[a, b]) for a, b in edges_from(list(down), root)]),
    )


def undirected_tree(
    fabric: Fabric, collective: Collective, weight: Fraction, root: int, edges: Sequence[Edge]
) -> Tree:
    """Return a tree of full-duplex edges, listed in any direction.

    It is used towards its root, away from it, or both, as the collective requires.
    """
    path_of = {(a, b): path for a, b, path in edges}
    for a, b, path in edges:
        path_of[b, a] = tuple(fabric.opposite[arc] for arc in reversed(path))
    pairs = edges_from([(a, b) for a, b, _ in edges], root)
    tree = directed_tree(
        fabric, weight, root,
        towards=[(b, a, path_of[b, a]) for a, b in pairs],
        away=[(a, b, path_of[a, b]) for a, b in pairs],
    )  # fmt: skip
    return one_way(collective, tree)


def one_way(collective: Collective, tree: Tree) -> Tree:
    """Return the tree without the direction that the collective does not use."""
    return replace(
        tree,
        reduce=() if collective in ("broadcast", "allgather") else tree.reduce,
        broadcast=() if collective in ("reduce", "reducescatter") else tree.broadcast,
    )


def centre(pairs: Pairs) -> int:
    """Return the rank of an undirected tree with the fewest steps to its farthest rank."""
    return min(sorted({rank for pair in pairs for rank in pair}), key=lambda r: _depth(pairs, r))


def _depth(pairs: Pairs, root: int) -> int:
    level = {root: 0}
    for a, b in edges_from(pairs, root):
        level[b] = level[a] + 1
    return max(level.values())


def edges_from(pairs: Pairs, root: int) -> list[tuple[int, int]]:
    """Return the edges of an undirected tree as (parent, child), those near the root first."""
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in pairs:
        near[a].append(b)
        near[b].append(a)
    found: list[tuple[int, int]] = []
    line, seen = [root], {root}
    for tail in line:
        for head in near[tail]:
            if head not in seen:
                seen.add(head)
                line.append(head)
                found.append((tail, head))
    return found


def _sends(fabric: Fabric, edges: Iterable[Edge]) -> tuple[Send, ...]:
    """Return the sends over the paths of the edges, by the names of places and links."""
    places, arcs = fabric.places, fabric.arcs
    return tuple(
        Send(places[a], places[b],
             tuple((arcs[i].link, places[arcs[i].tail], places[arcs[i].head]) for i in path))
        for a, b, path in edges
    )  # fmt: skip
