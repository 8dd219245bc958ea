"""From weighted trees over arcs to the sends of a plan's communication section.

Sends are listed in an order that can be executed: nearest first away from the root, farthest first
towards it.
A tree of an all-reduce may have any root, so it takes its centre: the fewest steps to the farthest
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hocket.plan.sections.communication import Collective, Communication, Send, Tree
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.few_trees import hung_up
from hocket.planners.communication.paths import Path

Edge = tuple[int, int, Path]
"""Two ranks, and the arcs from the first to the second."""


@dataclass(frozen=True)
class RoutedTree:
    """Edges with the path of each, and the root of the tree."""

    weight: Fraction
    root: int
    edges: tuple[Edge, ...]


def section_of(
    fabric: Fabric, collective: Collective, root: int, algorithm: str, trees: Sequence[Tree]
) -> Communication:
    """The section; the weights of the trees, in any unit, become shares."""
    total = sum((tree.share for tree in trees), Fraction(0))
    shared: dict[tuple[object, ...], Fraction] = {}
    for tree in trees:
        key = (tree.root, tree.reduce, tree.broadcast)
        shared[key] = shared.get(key, Fraction(0)) + tree.share / total
    return Communication(
        collective=collective,
        algorithm=algorithm,
        ranks=fabric.places[: fabric.num_ranks],
        root=fabric.places[root],
        trees=tuple(
            Tree(root_name, share, reduce, broadcast)  # type: ignore[arg-type]
            for (root_name, reduce, broadcast), share in shared.items()
        ),
    )


def one_direction(
    fabric: Fabric, tree: RoutedTree, *, is_reduce: bool, is_turned: bool = False
) -> Tree:
    """A tree of a collective that only spreads or only gathers.

    The edges of a reduction come from the fabric turned around, unless ``is_turned`` says that they
    already lead towards the root.
    """
    away = {((b, a) if is_turned else (a, b)): path for a, b, path in tree.edges}
    order = hung_up(tuple(away), tree.root)
    name = fabric.places[tree.root]
    if not is_reduce:
        return Tree(
            name, tree.weight, broadcast=sends_of(fabric, [(a, b, away[a, b]) for a, b in order])
        )
    towards = [(b, a, away[a, b] if is_turned else away[a, b][::-1]) for a, b in reversed(order)]
    return Tree(name, tree.weight, reduce=sends_of(fabric, towards))


def both_directions(fabric: Fabric, tree: RoutedTree) -> Tree:
    """A tree of an all-reduce: the same links towards the root and away from it."""
    path_of = {(a, b): path for a, b, path in tree.edges}
    for a, b, path in tree.edges:
        path_of[b, a] = tuple(fabric.opposite[arc] for arc in reversed(path))
    order = hung_up(tuple((a, b) for a, b, _ in tree.edges), tree.root)
    return Tree(
        fabric.places[tree.root],
        tree.weight,
        reduce=sends_of(fabric, [(b, a, path_of[b, a]) for a, b in reversed(order)]),
        broadcast=sends_of(fabric, [(a, b, path_of[a, b]) for a, b in order]),
    )


def rooted_at_centre(weight: Fraction, edges: tuple[Edge, ...]) -> RoutedTree:
    """An undirected tree hung up where it is shallowest."""
    pairs = tuple((a, b) for a, b, _ in edges)
    ranks = sorted({rank for pair in pairs for rank in pair})
    return RoutedTree(weight, min(ranks, key=lambda rank: _depth(pairs, rank)), edges)


def _depth(pairs: tuple[tuple[int, int], ...], root: int) -> int:
    level = {root: 0}
    for a, b in hung_up(pairs, root):
        level[b] = level[a] + 1
    return max(level.values())


def sends_of(fabric: Fabric, edges: Sequence[Edge]) -> tuple[Send, ...]:
    """Sends over the paths of the edges, by the names of places and links."""
    places = fabric.places
    return tuple(
        Send(
            places[a],
            places[b],
            tuple(
                (
                    fabric.arcs[arc].link,
                    places[fabric.arcs[arc].tail],
                    places[fabric.arcs[arc].head],
                )
                for arc in path
            ),
        )
        for a, b, path in edges
    )
