"""An order of a step's ops that holds few bytes at once, and the proof of how few are possible.

A portfolio: the graph's own order and the demand-driven one, both hoisted (`hoist`); cuts at the
ops with the most bytes bound every order (`cut`); while there is a gap, the peak's ops are moved to
their cheapest moments (`refine`), then pairs of them are ordered both ways, which raises the bound
and finds the orders that need it (`branch`). The effort is counted in walks over the graph, so the
same graph gives the same order on every machine. O(effort · pins).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph
from hocket.planners.memory.bound import Certificate, largest_cuts
from hocket.planners.memory.branch import Choice, branched, legal
from hocket.planners.memory.demand import demand_order
from hocket.planners.memory.exact import exact_order
from hocket.planners.memory.refine import Found, WorkLeft, hoisted_both_ways, refined
from hocket.planners.memory.storages import Storages, storages_of
from hocket.planners.memory.walk import peak_bytes

_VISITS = 5_000_000
"""Ops that all cuts of one search visit together, about."""
_MIN_EFFORT, _MAX_EFFORT = 100, 3_000
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
    for base in (given, demand_order(storages)):
        # A target that the next walk has to beat: one that is too low would forbid to run ahead.
        now = hoisted_both_ways(storages, base, found.peak_bytes - 1, effort)
        found = min(found, now, key=lambda each: each.peak_bytes)
    return _bounded(storages, found, effort)


def _bounded(storages: Storages, found: Found, effort: WorkLeft) -> tuple[Found, Choice | None]:
    """The order refined as far as its bound leaves a gap, and the bound."""
    if found.peak_bytes == 0:
        return found, None
    cuts = largest_cuts(storages, found.order, _MAX_CUTS)
    found = refined(storages, found, cuts[0].num_bytes, effort)
    if found.peak_bytes > cuts[0].num_bytes:
        found = exact_order(storages, found)
        more = largest_cuts(storages, found.order, _MAX_CUTS)
        cuts = [max(cuts[0], more[0], key=lambda cut: cut.num_bytes)]
    if found.peak_bytes > cuts[0].num_bytes:
        return branched(storages, found, cuts[0], effort)
    return found, Choice(cuts[0].num_bytes, cuts[0])


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
