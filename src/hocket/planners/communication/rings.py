"""Ring collectives on as many link-disjoint rings as fit: the baseline of NCCL and Horovod.

Each ring goes both ways. Every rank is the root of an equal share, which travels once around to be
reduced and once more to be spread: 2(n-1) steps of 1/n of a ring's part (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

import itertools
from fractions import Fraction

from hocket.plan.sections.communication import Collective, Communication, Tree
from hocket.planners.communication.fabric import Fabric
from hocket.planners.communication.orders import Order, most_orders
from hocket.planners.communication.plain import usual_ways
from hocket.planners.communication.sends import RoutedTree, one_way, section_of
from hocket.planners.communication.ways import Ways


def ring(
    fabric: Fabric, collective: Collective, root: int, *, algorithm: str = "ring"
) -> Communication | None:
    """The collective on the most rings; None where the ranks form no ring."""
    ways = usual_ways(fabric)
    trees: list[Tree] = []
    for weight, order in most_orders(fabric, ways, is_ring=True):
        for direction in (order, order[::-1]):
            trees += _trees(fabric, collective, root, ways, weight / 2, direction)
    return section_of(fabric, collective, root, algorithm, trees) if trees else None


def ring_in_order(
    fabric: Fabric, collective: Collective, root: int, *, algorithm: str
) -> Communication:
    """One ring over the ranks as they are numbered: what is left where no better ring exists."""
    ways = usual_ways(fabric)
    order = tuple(range(fabric.num_ranks))
    trees = _trees(fabric, collective, root, ways, Fraction(1), order)
    return section_of(fabric, collective, root, algorithm, trees)


def _trees(
    fabric: Fabric, collective: Collective, root: int, ways: Ways, weight: Fraction, order: Order
) -> list[Tree]:
    """The trees of one direction of a ring."""
    if collective in ("broadcast", "reduce"):
        return [_tree(fabric, collective, ways, weight, _from(order, root))]
    part = weight / len(order)
    return [_tree(fabric, collective, ways, part, _from(order, rank)) for rank in order]


def _from(order: Order, rank: int) -> Order:
    at = order.index(rank)
    return order[at:] + order[:at]


def _tree(
    fabric: Fabric, collective: Collective, ways: Ways, weight: Fraction, order: Order
) -> Tree:
    """Around the ring to its first rank, and around from there once more."""
    root = order[0]
    spread = tuple((a, b, ways.path(a, b)) for a, b in itertools.pairwise(order))
    last = (*order[1:], root)
    collect = tuple((a, b, ways.path(a, b)) for a, b in itertools.pairwise(last))
    into = one_way(fabric, RoutedTree(weight, root, collect), is_reduce=True, is_turned=True)
    out = one_way(fabric, RoutedTree(weight, root, spread), is_reduce=False)
    return Tree(
        into.root,
        weight,
        reduce=into.reduce if collective not in ("broadcast", "allgather") else (),
        broadcast=out.broadcast if collective not in ("reduce", "reducescatter") else (),
    )
