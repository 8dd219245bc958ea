"""An order of a step's ops that holds few bytes at once, and the proof of how few are possible.

A portfolio: the graph's own order and the demand-driven ones, all hoisted (`hoist`); cuts at the
ops with the most bytes bound every order (`cut`); while there is a gap, the peak's ops are moved to
their cheapest moments (`refine`), then pairs of them are ordered both ways, which raises the bound
and finds the orders that need it (`branch`). The effort is counted in walks over the graph, so the
same graph gives the same order on every machine. O(effort · pins).
"""

from __future__ import annotations

from itertools import product

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph
from hocket.planners.memory.bound import Certificate, largest_cuts
from hocket.planners.memory.branch import Choice, branched
from hocket.planners.memory.cut import maximum_flow
from hocket.planners.memory.demand import demand_order
from hocket.planners.memory.exact import exact_order
from hocket.planners.memory.hoist import LONG_REACH, SHORT_REACH
from hocket.planners.memory.legal import legal
from hocket.planners.memory.refine import Found, WorkLeft, hoisted_both_ways, refined
from hocket.planners.memory.storages import Storages, storages_of
from hocket.planners.memory.walk import peak_bytes

_VISITS = 3_000_000
"""Ops that all cuts of one search visit together, about."""
_MIN_EFFORT, _MAX_EFFORT = 250, 4_000
_SHARES = (0.0, 0.3, 0.6, 0.9)
"""Targets between the bound and the present peak."""
_MAX_CUTS = 24
"""Cuts that one order is asked for."""


def memory_order(graph: Graph) -> IntArray:
    """The ops in an order that holds few bytes at once, on one device."""
    return certified_order(graph)[0]


def certified_order(graph: Graph) -> tuple[IntArray, Certificate]:
    """Such an order, and how far from the best one it can be."""
    storages = storages_of(graph)
    found, proof = search(storages)
    return found.order.astype(np.int32), certificate_of(storages, found.peak_bytes, proof)


def order_bound(graph: Graph, order: IntArray) -> Certificate:
    """How far from the best order a given one can be."""
    storages = storages_of(graph)
    along = order.astype(np.int64)
    found = Found(peak_bytes(storages, along), along)
    return certificate_of(
        storages, found.peak_bytes, _bounded(storages, found, _effort(storages))[1]
    )


def search(storages: Storages) -> tuple[Found, Choice | None]:
    """The best order that the portfolio finds, and what bounds every order."""
    effort = _effort(storages)
    given = np.arange(storages.num_ops, dtype=np.int64)
    if np.any(storages.before >= storages.after):  # precedences besides those of the graph
        given = legal(storages, given)
    found = Found(peak_bytes(storages, given), given)
    if storages.num_ops == 0 or found.peak_bytes == 0:
        return found, None
    demanded = (demand_order(storages, last_first=backwards) for backwards in (False, True))
    for base, reach in product((given, *demanded), (SHORT_REACH, LONG_REACH)):
        # A target that the next walk has to beat: one that is too low would forbid to run ahead.
        now = hoisted_both_ways(storages, base, found.peak_bytes - 1, effort, reach)
        found = min(found, now, key=lambda each: each.peak_bytes)
    return _bounded(storages, found, effort)


def _bounded(storages: Storages, found: Found, effort: WorkLeft) -> tuple[Found, Choice | None]:
    """The order refined as far as its bound leaves a gap, and the bound."""
    if found.peak_bytes == 0:
        return found, None
    cuts = largest_cuts(storages, found.order, _MAX_CUTS)
    found = _squeezed(storages, found, cuts[0].num_bytes, effort)
    found = refined(storages, found, cuts[0].num_bytes, effort)
    if found.peak_bytes > cuts[0].num_bytes:
        found = exact_order(storages, found)
        known = {cut.op: cut for cut in (*cuts, *largest_cuts(storages, found.order, _MAX_CUTS))}
        cuts = sorted(known.values(), key=lambda cut: -cut.num_bytes)
    if found.peak_bytes > cuts[0].num_bytes:
        return branched(storages, found, cuts, effort)
    return found, Choice(cuts[0].num_bytes, maximum_flow(storages, cuts[0].op))


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


def certificate_of(storages: Storages, peak: int, proof: Choice | None) -> Certificate:
    """What a search has proven, with what exists before the step."""
    kept = int(storages.num_bytes[storages.is_kept].sum())
    bound = max(kept, proof.bound_bytes if proof is not None else 0)
    return Certificate(
        peak_bytes=storages.start_bytes + peak,
        start_bytes=storages.start_bytes,
        bound_bytes=storages.start_bytes + bound,
        proof=proof,
    )
