"""An order of a step's ops that holds few bytes at once, and a bound on how few are possible.

A portfolio: the graph's own order and the demand-driven ones, all hoisted (`hoist`). Cuts at the
ops with the most bytes bound every order (`cut`). While there is a gap, the peak's ops are moved to
their cheapest moments, towards targets between the bound and the peak (`refine`); graphs of at most
62 ops get their best order (`exact`). The effort is counted in walks over the graph, so the same
graph gives the same order on every machine. O(effort · pins).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Graph
from hocket.planners.memory.demand import demand_order
from hocket.planners.memory.exact import exact_order
from hocket.planners.memory.hoist import LONG_REACH, SHORT_REACH, memory_curve, peak_bytes
from hocket.planners.memory.refine import Found, WorkLeft, hoisted_both_ways, minimum_cut, refined
from hocket.planners.memory.storages import Storages, legal, storages_of

_VISITS = 3_000_000
"""Ops that all cuts of one search visit together, about."""
_MIN_EFFORT, _MAX_EFFORT = 250, 4_000
_SHARES = (0.0, 0.3, 0.6, 0.9)
"""Targets between the bound and the present peak."""
_MAX_CUTS = 24
"""Cuts that one order is asked for."""
_STRETCHES = 12
"""Parts of an order whose fullest ops are asked first."""
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class OrderBound:
    """How far an order can be from the best one; all bytes with what exists before the step."""

    peak_bytes: int
    start_bytes: int
    """What exists before the step."""
    bound_bytes: int
    """No order has a lower peak."""

    @property
    def gap(self) -> float:
        """Share by which the bytes of the order are above the bound, without what exists before."""
        bound = self.bound_bytes - self.start_bytes
        return (self.peak_bytes - self.bound_bytes) / bound if bound else 0.0


def memory_order(graph: Graph) -> IntArray:
    """Return the ops in an order that holds few bytes at once, on one device."""
    return bounded_order(graph)[0]


def bounded_order(graph: Graph) -> tuple[IntArray, OrderBound]:
    """Return such an order, and how far from the best one it can be."""
    storages = storages_of(graph)
    found, bound_bytes = search(storages)
    return found.order.astype(np.int32), bound_of(storages, found.peak_bytes, bound_bytes)


def order_bound(graph: Graph, order: IntArray) -> OrderBound:
    """Return how far from the best order a given one can be."""
    storages = storages_of(graph)
    return bound_of(storages, peak_bytes(storages, order.astype(np.int64)), search(storages)[1])


def bound_of(storages: Storages, peak: int, bound_bytes: int) -> OrderBound:
    """Add what exists before the step, and what stays to its end."""
    kept = int(storages.num_bytes[storages.is_kept].sum())
    return OrderBound(
        peak_bytes=storages.start_bytes + peak,
        start_bytes=storages.start_bytes,
        bound_bytes=storages.start_bytes + max(kept, bound_bytes),
    )


def search(storages: Storages) -> tuple[Found, int]:
    """Return the best order that the portfolio finds, and bytes that every order holds."""
    effort = _effort(storages)
    given = np.arange(storages.num_ops, dtype=np.int64)
    if np.any(storages.before >= storages.after):  # precedences besides those of the graph
        given = legal(storages, given)
    found = Found(peak_bytes(storages, given), given)
    if storages.num_ops == 0 or found.peak_bytes == 0:
        return found, 0
    demanded = (demand_order(storages, last_first=backwards) for backwards in (False, True))
    for base, reach in product((given, *demanded), (SHORT_REACH, LONG_REACH)):
        # A target that the next walk has to beat: one that is too low would forbid to run ahead.
        now = hoisted_both_ways(storages, base, found.peak_bytes - 1, effort, reach)
        found = min(found, now, key=lambda each: each.peak_bytes)
    return _refined(storages, found, effort) if found.peak_bytes else (found, 0)


def _refined(storages: Storages, found: Found, effort: WorkLeft) -> tuple[Found, int]:
    """Refine the order as far as its bound leaves a gap."""
    bound = 0
    for _ in range(_ROUNDS):
        before = found.peak_bytes
        bound = max(bound, _largest_cut(storages, found.order))
        found = _squeezed(storages, found, bound, effort)
        for share in _SHARES:
            target = bound + int(share * (found.peak_bytes - bound))
            found = refined(storages, found, target, effort)
        if found.peak_bytes in (bound, before):
            break
    if found.peak_bytes > bound:
        found, is_best = exact_order(storages, found)
        bound = found.peak_bytes if is_best else max(bound, _largest_cut(storages, found.order))
    return found, bound


def _squeezed(storages: Storages, found: Found, bound: int, effort: WorkLeft) -> Found:
    """Walk again under lower targets as long as one of them helps."""
    best = found
    for share in _SHARES:
        target = bound + int(share * (best.peak_bytes - bound))
        now = hoisted_both_ways(storages, best.order, target, effort)
        best = min(best, now, key=lambda each: each.peak_bytes)
    return best if best.peak_bytes == found.peak_bytes else _squeezed(storages, best, bound, effort)


def _effort(storages: Storages) -> WorkLeft:
    cuts = _VISITS // max(storages.num_ops, 1)
    return WorkLeft(min(max(cuts, _MIN_EFFORT), _MAX_EFFORT))


def _largest_cut(storages: Storages, order: LongArray) -> int:
    """Return the largest cut of the ops at which an order holds most; `_MAX_CUTS` end the search.

    The op of each stretch of the order that holds most is asked first: an order that is bad in one
    place says little about where the best one peaks.
    """
    curve = memory_curve(storages, order)
    stretches = np.array_split(np.arange(len(order)), min(_STRETCHES, max(len(order), 1)))
    tops = np.array([part[np.argmax(curve[part])] for part in stretches if len(part)])
    tops = tops[np.argsort(-curve[tops], kind="stable")]
    falling = np.argsort(-curve, kind="stable")
    asked: set[int] = set()
    bound = 0
    for position in (*tops.tolist(), *falling.tolist()):
        op = int(order[position])
        if curve[position] > bound and op not in asked:
            asked.add(op)
            bound = max(bound, minimum_cut(storages, op).num_bytes)
        if len(asked) == _MAX_CUTS:
            break
    return bound
