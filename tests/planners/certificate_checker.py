"""Oracle: proves the certificates of collective bounds again, from the arcs alone.

It shares nothing with the code that finds bounds. Cuts are added up link by link. Prices prove a
bound when one unit of the collective costs at least 1: path costs are relaxed arc by arc (Bellman
and Ford), and trees are bounded from below by raising duals of sets that nothing cheap enters
(Fulkerson, 1974), which is a proof whatever order they are raised in.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hocket.base.errors import CheckError
from hocket.plan.sections.communication import Collective
from hocket.planners.communication.cuts import Certificate, LinkCut, Prices
from hocket.planners.communication.fabric import Fabric

_TOWARDS = ("reduce", "reducescatter")
_NEVER = float("inf")


def check_certificate(
    fabric: Fabric, collective: Collective, root: int, certificate: Certificate
) -> None:
    """Raise `CheckError` unless the certificate proves its bound for this collective."""
    if isinstance(certificate, LinkCut):
        proven = _cut(fabric, collective, root, certificate)
    else:
        proven = _prices(fabric, collective, root, certificate)
    if proven > certificate.bound:
        raise CheckError(
            f"the certificate proves {proven} units for {collective}, not {certificate.bound}",
            hint="report it with the topology",
        )


def _refuse(reason: str) -> CheckError:
    return CheckError(f"the certificate proves nothing: {reason}")


def _cut(fabric: Fabric, collective: Collective, root: int, cut: LinkCut) -> Fraction:
    number = {place: index for index, place in enumerate(fabric.places)}
    side = {number[place] for place in cut.side}
    ranks_inside = sum(1 for place in side if place < fabric.num_ranks)
    if ranks_inside in (0, fabric.num_ranks):
        raise _refuse("its cut does not separate ranks")
    leaving: dict[int, int] = {}
    for arc in fabric.arcs:
        tail, head = (arc.head, arc.tail) if collective in _TOWARDS else (arc.tail, arc.head)
        if tail in side and head not in side:
            leaving[arc.channel] = fabric.capacity[arc.channel]
    crossing = Fraction(sum(leaving.values()))
    if collective in ("broadcast", "reduce"):
        if root not in side:
            raise _refuse("its cut does not contain the root")
        return crossing
    if collective in ("allgather", "reducescatter"):
        return fabric.num_ranks * crossing / ranks_inside
    raise _refuse(f"a cut says nothing about {collective}")


def _prices(fabric: Fabric, collective: Collective, root: int, prices: Prices) -> Fraction:
    if len(prices.price) != len(fabric.capacity) or min(prices.price) < 0:
        raise _refuse("it needs one price per channel, none negative")
    total = sum(
        (price * units for price, units in zip(prices.price, fabric.capacity, strict=True)),
        Fraction(0),
    )
    cost = _path_costs(fabric, prices)
    least = _least(cost, collective, root)
    if least <= 0:
        raise _refuse("its prices let the collective be free")
    return total / least


def _path_costs(fabric: Fabric, prices: Prices) -> list[list[Any]]:
    """Cheapest costs from rank to rank."""
    rows = []
    for start in range(fabric.num_ranks):
        cost: list[Any] = [_NEVER] * fabric.num_places
        cost[start] = Fraction(0)
        changed = True
        while changed:
            changed = False
            for arc in fabric.arcs:
                forwards = arc.tail == start or arc.tail >= fabric.num_ranks
                if forwards and cost[arc.tail] + prices.price[arc.channel] < cost[arc.head]:
                    cost[arc.head] = cost[arc.tail] + prices.price[arc.channel]
                    changed = True
        rows.append(cost[: fabric.num_ranks])
    return rows


def _least(cost: list[list[Any]], collective: Collective, root: int) -> Fraction:
    """A lower bound of what one byte of the whole message costs."""
    count = len(cost)
    turned = [list(column) for column in zip(*cost, strict=True)]
    if collective == "broadcast":
        return _tree_at_least(cost, root)
    if collective == "reduce":
        return _tree_at_least(turned, root)
    out = [_tree_at_least(cost, rank) for rank in range(count)]
    if collective == "allgather":
        return sum(out, Fraction(0)) / count
    into = [_tree_at_least(turned, rank) for rank in range(count)]
    if collective == "reducescatter":
        return sum(into, Fraction(0)) / count
    return min(a + b for a, b in zip(out, into, strict=True))


def _tree_at_least(cost: list[list[Any]], root: int) -> Fraction:
    """Lower bound on the cost of any tree away from the root: a feasible dual solution.

    Every tree enters every set without the root; raising a set's dual by the least reduced cost
    that enters it keeps all reduced costs at 0 or above, so the sum of all raises is a bound.
    """
    count = len(cost)
    reduced = [list(row) for row in cost]
    total = Fraction(0)
    while True:
        unreached = set(range(count)) - _reached(reduced, {root})
        if not unreached:
            return total
        # A set that no free arc enters: what leads to one node by free arcs, once it is smallest.
        node = min(unreached)
        grown = _leading_to(reduced, node)
        for other in sorted(grown):
            before = _leading_to(reduced, other)
            if len(before) < len(grown):
                grown = before
        entering = [(a, b) for b in grown for a in range(count) if a not in grown]
        step = min(reduced[a][b] for a, b in entering)
        if step == _NEVER:
            raise _refuse("its fabric does not connect the ranks")
        for a, b in entering:
            reduced[a][b] -= step
        total += step


def _reached(cost: list[list[Any]], seen: set[int]) -> set[int]:
    stack = list(seen)
    while stack:
        a = stack.pop()
        for b in range(len(cost)):
            if b not in seen and a != b and cost[a][b] == 0:
                seen.add(b)
                stack.append(b)
    return seen


def _leading_to(cost: list[list[Any]], node: int) -> set[int]:
    """Nodes from which free arcs lead to this one."""
    seen, stack = {node}, [node]
    while stack:
        b = stack.pop()
        for a in range(len(cost)):
            if a not in seen and a != b and cost[a][b] == 0:
                seen.add(a)
                stack.append(a)
    return seen
