"""Favourite children: a relaxation of "one favourite each" is solved, swept and rounded.

Hanen and Munier (1995), as used by Jeon et al., "Baechi", SoCC 2020: if every op could keep one of
its readers on its own device, and every op follow one of its producers, which pairs would make the
longest path shortest? Small problems go to a linear programme, large ones to a descent that comes
within half a percent of it. Favours that no long path needs are then given up, because a device
that waits for a favourite to no end only loses time, and what is left becomes a matching.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.shared import longest_from_start
from hocket.planners.tables import mean_transfer_s
from hocket.simulate.load import summed

# The edges between ops and what they cost, as arrays that compiled code reads.


class ReaderPairs(NamedTuple):
    """Distinct (producer, reader) pairs of ops, in order of reader then producer."""

    op_s: FloatArray
    """Per op: seconds on the device that is fastest at it."""
    src: IntArray
    dst: IntArray
    cost_s: FloatArray
    """Per edge: mean seconds to send its tensors."""
    in_ptr: LongArray
    """Edges ``in_ptr[i]`` up to ``in_ptr[i + 1]`` end at op i."""
    out_ptr: LongArray
    out_edge: IntArray
    """Edges ``out_edge[out_ptr[i]:out_ptr[i + 1]]`` begin at op i."""
    is_free: BoolArray
    """Per edge: whether it is alone at both ends, so that being a favourite displaces none."""
    is_open: BoolArray
    """Per edge: whether something is to be decided: it is not free and costs time."""


def net_of(problem: Problem) -> ReaderPairs:
    """The net of a problem. An op that no device can run takes no time."""
    op_s = problem.costs.op_s[np.unique(problem.costs.device_row)]
    fastest_s = np.min(op_s, axis=0, where=np.isfinite(op_s), initial=np.inf)
    src, dst = problem.graph.edges
    return make_net(np.where(np.isfinite(fastest_s), fastest_s, 0.0), src, dst, _edge_s(problem))


def make_net(op_s: FloatArray, src: IntArray, dst: IntArray, cost_s: FloatArray) -> ReaderPairs:
    """The net of edges that are in order of reader then producer."""
    num_ops = len(op_s)
    out_degree, in_degree = (np.bincount(ends, minlength=num_ops) for ends in (src, dst))
    is_free = (out_degree[src] == 1) & (in_degree[dst] == 1)
    return ReaderPairs(
        op_s=table(op_s, np.float64),
        src=table(src, np.int32),
        dst=table(dst, np.int32),
        cost_s=table(cost_s, np.float64),
        in_ptr=_offsets(in_degree),
        out_ptr=_offsets(out_degree),
        out_edge=table(np.argsort(src, kind="stable"), np.int32),
        is_free=table(is_free, np.bool_),
        is_open=table(~is_free & (cost_s > 0), np.bool_),
    )


def _offsets(counts: LongArray) -> LongArray:
    return table(pointers(counts), np.int64)


def _edge_s(problem: Problem) -> FloatArray:
    """Per edge of the graph: seconds to send all of its tensors."""
    graph = problem.graph
    reader = graph.reader
    producer = graph.tensor_producer[graph.reads].astype(np.int64)
    # Reads of one op ascend, and so do the producers of ascending tensors: edges come in order.
    is_first = np.diff(producer, prepend=-1) != 0
    is_first |= np.diff(reader, prepend=-1) != 0
    is_made = producer >= 0
    edge = np.cumsum(is_first & is_made) - 1
    sent_s = mean_transfer_s(problem)[graph.reads[is_made]]
    return summed(edge[is_made], sent_s, len(graph.edges[0]))


# Favours from a linear programme, solved to the optimum by HiGHS.
#
# Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors with
# small communication delays", 1995. Every edge has a favour between 0 and 1 that cuts its transfer
# by that share, the favours at either side of an op are 1 in all at most, and the longest path is
# to be short. Variables are the open favours, the start of each op and the longest path; rows are
# the edges and the ops with several open edges on a side. Polynomial; seconds above a few thousand
# edges.


def optimal_favours(net: ReaderPairs) -> FloatArray | None:
    """Favour per edge with the least longest path; None where the solver gives up."""
    from scipy.optimize import linprog

    favour = net.is_free.astype(np.float64)
    open_edge = np.flatnonzero(net.is_open)
    if not len(open_edge):
        return favour
    # The solver's tolerances are absolute, so times have to be near 1.
    unit_s = float(net.cost_s[open_edge].mean())
    num_favours, num_ops = len(open_edge), len(net.op_s)
    objective = np.zeros(num_favours + num_ops + 1)
    objective[-1] = 1.0
    rows, limits = _constraints(net, open_edge, unit_s)
    bounds = np.zeros((len(objective), 2))
    bounds[:num_favours, 1], bounds[num_favours:, 1] = 1.0, np.inf
    found = linprog(objective, A_ub=rows, b_ub=limits, bounds=bounds, method="highs-ds")
    if found.status != 0:
        return None
    favour[open_edge] = np.clip(found.x[:num_favours], 0.0, 1.0)
    return favour


def _constraints(net: ReaderPairs, open_edge: LongArray, unit_s: float) -> tuple[Any, FloatArray]:
    """Rows and upper limits of the programme; columns: favours, starts, longest path."""
    from scipy.sparse import vstack

    num_favours, num_ops = len(open_edge), len(net.op_s)
    width = num_favours + num_ops + 1
    paths = _path_rows(net, open_edge, unit_s, width)
    last = np.flatnonzero(np.diff(net.out_ptr) == 0)
    row = np.arange(len(last))
    ends = _rows(len(last), width, (row, num_favours + last, 1.0), (row, width - 1, -1.0))
    favour_rows = [_favour_rows(side[open_edge], width) for side in (net.src, net.dst)]
    sent_s = np.where(net.is_free, 0.0, net.cost_s)
    limits = [-(net.op_s[net.src] + sent_s) / unit_s, -net.op_s[last] / unit_s]
    limits += [np.ones(rows.shape[0]) for rows in favour_rows]
    return vstack([paths, ends, *favour_rows]).tocsr(), np.concatenate(limits)


def _path_rows(net: ReaderPairs, open_edge: LongArray, unit_s: float, width: int) -> Any:
    """The reader of each edge starts when the producer has ended and its tensors are sent."""
    num_favours, num_edges = len(open_edge), len(net.src)
    row = np.arange(num_edges)
    return _rows(
        num_edges,
        width,
        (row, num_favours + net.src, 1.0),
        (row, num_favours + net.dst, -1.0),
        (open_edge, np.arange(num_favours), -net.cost_s[open_edge] / unit_s),
    )


def _favour_rows(end: NDArray[np.int32], width: int) -> Any:
    """At most one favour in all for each op at which several open edges come together."""
    op, row, count = np.unique(end, return_inverse=True, return_counts=True)
    crowded = np.flatnonzero(count > 1)
    number = np.full(len(op), -1)
    number[crowded] = np.arange(len(crowded))
    column = np.flatnonzero(number[row] >= 0)
    return _rows(len(crowded), width, (number[row][column], column, 1.0))


def _rows(height: int, width: int, *parts: tuple[Any, Any, Any]) -> Any:
    """A sparse matrix of parts (row, column, value), where one value may apply to all."""
    from scipy.sparse import coo_array

    wide = [np.broadcast_arrays(*part) for part in parts]
    row, column, value = (np.concatenate([part[index] for part in wide]) for index in range(3))
    return coo_array((value.astype(np.float64), (row, column)), shape=(height, width))


# Integral favourites from favours: a heavy matching of producers and readers.
#
# The weight of an edge is its favour times its transfer. Edges with a favour of 1 are kept. If few
# others are undecided, their matching has the greatest weight (shortest augmenting paths, Jonker
# and Volgenant 1987; quadratic in practice); if many, they are taken from the heaviest down, which
# gives half of it at least: readers offer themselves to producers, which keep the heaviest edge,
# and who is displaced tries elsewhere (suitors, Manne and Halappanavar 2014; O(edges) in practice).

_ROUNDING = 1e-6
"""Favours closer than this to 0 and 1 are taken to be those."""
_MAX_EXACT_EDGES = 5_000
"""Up to as many undecided edges are matched exactly."""


def match_favourites(net: ReaderPairs, favour: FloatArray) -> IntArray:
    """The favourite child of each op, or -1; no op is the favourite of two."""
    child = np.full(len(net.op_s), -1, dtype=np.int32)
    whole = np.flatnonzero(favour >= 1 - _ROUNDING)
    child[net.src[whole]] = net.dst[whole]
    is_child = np.zeros(len(net.op_s), dtype=np.bool_)
    is_child[net.dst[whole]] = True
    undecided = (favour > _ROUNDING) & (net.cost_s > 0) & (child[net.src] < 0) & ~is_child[net.dst]
    edge = np.flatnonzero(undecided)
    match = _match_exactly if len(edge) <= _MAX_EXACT_EDGES else _match_heaviest
    chosen = match(net, edge, favour[edge] * net.cost_s[edge])
    child[net.src[chosen]] = net.dst[chosen]
    return child


def _match_exactly(net: ReaderPairs, edge: LongArray, weight: FloatArray) -> LongArray:
    """The edges of a matching of the greatest weight."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    if not len(edge):
        return edge
    src, row = np.unique(net.src[edge], return_inverse=True)
    dst, column = np.unique(net.dst[edge], return_inverse=True)
    # Every producer has a reader of its own to fall back on, so that all of them can be matched;
    # then 1 more on every edge changes nothing, and keeps weights from being taken for absent.
    spare = np.arange(len(src))
    value = np.concatenate((1 + weight / weight.max(), np.ones(len(src))))
    ends = np.concatenate((row, spare)), np.concatenate((column, len(dst) + spare))
    matrix = csr_array((value, ends), shape=(len(src), len(dst) + len(src)))
    rows, columns = min_weight_full_bipartite_matching(matrix, maximize=True)
    partner = np.full(len(src), -1)
    partner[rows] = columns
    return edge[np.flatnonzero(partner[row] == column)]


def _match_heaviest(net: ReaderPairs, edge: LongArray, weight: FloatArray) -> LongArray:
    """The edges that are left when they are taken from the heaviest down, ties in order."""
    from hocket.planners.placement.favourite_kernels import match_once

    of_all = np.zeros(len(net.src))
    of_all[edge] = weight
    chosen, taken = (np.full(len(net.op_s), -1, dtype=np.int32) for _ in range(2))
    match_once(net, of_all, chosen, taken)
    return chosen[chosen >= 0].astype(np.int64)


# Redistribution of favours, op by op: a local improvement of the result of the descent.
#
# A sweep from the last op to the first gives the edges that begin at each op the favours that make
# the longest of them as short as possible, within what the readers have not given to others; edges
# that are short enough for the target already give theirs up. The next sweep does the same from the
# first op to the last for the edges that end at each op. Paths never grow beyond the longer of the
# target and what they were, so it can be stopped at any time. O(edges) per sweep.

_SWEEPS = 10
_CUT = 0.003
"""Share by which each sweep is to make the longest path shorter."""


def longest_path_s(net: ReaderPairs, favour: FloatArray) -> float:
    """The longest path, with every transfer cut by its favour."""
    return float(_ends_s(net, favour).max(initial=0.0))


def needed_favours(net: ReaderPairs, favour: FloatArray) -> FloatArray:
    """Favours with a longest path that is no longer; free edges too have only what it needs."""
    from hocket.planners.placement.favourite_kernels import (
        Direction,
        FavourScratch,
        sweep_back_and_forth,
    )

    num_ops, num_edges = len(net.op_s), len(net.src)
    head_s, tail_s = _ends_s(net, favour), np.zeros(num_ops)
    out_total, in_total = (summed(ends, favour, num_ops) for ends in (net.src, net.dst))
    most = max(int(np.diff(ptr).max(initial=0)) for ptr in (net.in_ptr, net.out_ptr))
    cuts = FavourScratch(favour=favour.copy(), length_s=np.zeros(most), cost_s=np.zeros(most))
    readers, numbers = net.dst[net.out_edge], np.arange(num_edges)
    back = Direction(
        net.out_ptr, net.out_edge, table(readers, np.int32), head_s, tail_s, out_total, in_total
    )
    forth = Direction(
        net.in_ptr, table(numbers, np.int32), net.src, tail_s, head_s, in_total, out_total
    )
    longest_s = float(head_s.max(initial=0.0))
    sweep_back_and_forth(net, back, forth, cuts, longest_s, _SWEEPS, _CUT)
    return cuts.favour


def _ends_s(net: ReaderPairs, favour: FloatArray) -> FloatArray:
    """Per op: the longest path to its end."""
    sent_s = net.cost_s * (1.0 - favour)
    start_s = np.zeros(len(net.op_s))
    after = table(net.dst[net.out_edge], np.int64)
    longest_from_start(net.out_ptr, after, sent_s[net.out_edge], net.op_s, start_s)
    ends_s: FloatArray = start_s + net.op_s
    return ends_s


# Favours for large graphs: descent on a smoothed longest path, after Frank and Wolfe (1956).
#
# The longest path becomes soft: every maximum is a log-sum-exp, so that all long paths count and
# each edge has a flow, the share of the long paths that use it. A round finds a matching of
# great weight on the seconds that favours would save, and moves favours towards it, but only at the
# ops that the matching covers: elsewhere nothing is lost. The temperature falls from two mean
# lengths of an edge to a twentieth, since what smoothing adds grows with the edges on a path.
# O(rounds · edges).

_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 2.0, 0.05
"""In mean lengths of an edge, with its producer, on the long paths."""
_MAX_ROUNDS, _MIN_ROUNDS = 300, 30
_TOTAL_EDGES = 36_000_000
"""Approximate limit on edges over all rounds; more gains little on the largest graphs."""


def descended_favours(net: ReaderPairs, num_rounds: int | None = None) -> FloatArray:
    """Favours of a short longest path; the number of rounds follows from the size if not given."""
    from hocket.planners.placement.favourite_kernels import Descent, descend

    num_ops, num_edges = len(net.op_s), len(net.src)
    if num_rounds is None:
        num_rounds = int(np.clip(_TOTAL_EDGES // max(num_edges, 1), _MIN_ROUNDS, _MAX_ROUNDS))
    descent = Descent(
        favour=net.is_free.astype(np.float64),
        weight=np.zeros(num_edges),
        start_s=np.zeros(num_ops),
        flow=np.zeros(num_ops),
        chosen=np.full(num_ops, -1, dtype=np.int32),
        taken=np.full(num_ops, -1, dtype=np.int32),
    )
    temperatures = np.geomspace(_FIRST_TEMPERATURE, _LAST_TEMPERATURE, num_rounds)
    steps = 2 / (np.arange(num_rounds) + 2)
    # Replaced, after one round, by the mean over the paths themselves.
    guess_s = float(net.op_s.sum() + net.cost_s.sum()) / max(num_edges, 1)
    descend(net, descent, guess_s, temperatures, steps)
    return descent.favour


_MAX_LINEAR_EDGES = 3_000
"""Up to as many open edges the linear programme takes less than half a second."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Favourites:
    """Which reader should follow each op on the same device."""

    child: IntArray
    """Per op: its favourite child, or -1; no op is the favourite of two."""
    need: FloatArray
    """Per op: the favour, from 0 to 1, that long paths need of its favourite child."""
    spared_s: FloatArray
    """Per op: mean seconds of the transfer to its favourite child; 0 without one."""
    path_s: float
    """Longest path of the relaxation, in which an op may divide its favour among its readers."""
    method: str
    """Solver of the relaxation: ``linear programme`` or ``descent``."""


def favourite_children(problem: Problem) -> Favourites:
    """The favourite children of the ops of a problem."""
    net = net_of(problem)
    favour, method = None, "linear programme"
    if net.is_open.sum() <= _MAX_LINEAR_EDGES:
        favour = optimal_favours(net)
    if favour is None:
        favour, method = descended_favours(net), "descent"
    needed = needed_favours(net, favour)
    favour = np.where(net.is_free, 1.0, needed)
    child = match_favourites(net, favour)
    chosen = np.flatnonzero(child[net.src] == net.dst)
    need, spared_s = np.zeros((2, len(child)))
    need[net.src[chosen]], spared_s[net.src[chosen]] = needed[chosen], net.cost_s[chosen]
    path_s = longest_path_s(net, favour)
    return Favourites(child=child, need=need, spared_s=spared_s, path_s=path_s, method=method)
