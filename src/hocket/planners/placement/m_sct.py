"""m-SCT (small communication times): m-ETF with devices that wait for favourite children.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hanen and
Munier (1995). A linear relaxation selects the edges without transfer (`favourite_children`); a
device that could start the favourite child of its last op before any other device stays awake for
it, and meanwhile runs only ops that every device could start. `list_schedule` states the rules.
O(ops · devices · log(ready ops)) in practice, plus the time to find the favourites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.m_etf import list_schedule
from hocket.planners.shared import longest_from_start
from hocket.planners.tables import mean_transfer_s
from hocket.simulate.load import summed

# Favourite children for m-SCT: which reader should follow each op on the same device.
#
# Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors
# with small communication delays", 1995, as used by Jeon et al., "Baechi", SoCC 2020. Every edge
# gets a favour between 0 and 1, the fraction of its transfer that is saved; the favours of the
# edges into an op add up to at most 1, as do those of the edges out of it. The relaxation
# minimises the longest path, and rounding turns large favours into favourites. Small problems are
# solved as a linear programme, large ones by a Frank-Wolfe style descent that comes within one
# percent of its optimum, each round O(edges) plus a greedy matching.


_MAX_LINEAR_EDGES = 3_000
"""Edges with a transfer up to which the linear programme takes less than half a second."""
_LEAST_FAVOUR = 0.5 - 1e-6
"""Favour from which the linear programme's solution is rounded up to a favourite.

Baechi rounds up from one half, or only from nine tenths. Below one half a device more often than
not waits in vain, and the graph of Hanen and Munier takes 42 instead of 36 on two devices.
"""
_LEAST_DESCENDED = 0.9
"""Favour from which the descent's solution is rounded up to a favourite.

The descent leaves fractions on edges that no long path needs, so only large favours are used: a
GNMT of 205k ops on 16 cards takes 3.5 s per step instead of 4.5.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Favourites:
    """The favourite child of each op."""

    child: IntArray
    """Per op: its favourite child, -1 if none. No op is the favourite of two producers."""
    spared_s: FloatArray
    """Per op: mean seconds of the transfer to its favourite child; 0 if it has none."""
    path_s: float
    """Longest path of the relaxation, in which an op may split its favour over several readers."""


def favourite_children(problem: Problem) -> Favourites:
    """Compute the favourite child of every op of a problem."""
    net = net_of(problem)
    favour = optimal_favours(net) if np.count_nonzero(net.cost_s) <= _MAX_LINEAR_EDGES else None
    least = _LEAST_FAVOUR
    if favour is None:
        favour, least = descended_favours(net), _LEAST_DESCENDED
    num_ops = len(net.op_s)
    child, spared_s = np.full(num_ops, -1, dtype=np.int32), np.zeros(num_ops)
    chosen = _rounded(net, favour, least)
    child[net.src[chosen]], spared_s[net.src[chosen]] = net.dst[chosen], net.cost_s[chosen]
    return Favourites(child=child, spared_s=spared_s, path_s=longest_path_s(net, favour))


def _rounded(net: ReaderPairs, favour: FloatArray, least: float) -> LongArray:
    """Return the edges rounded up to favourites, at most one out of and one into each op.

    Edges of larger favour come first, then those with the longer transfer.
    """
    edge = np.flatnonzero((favour >= least) & (net.cost_s > 0))
    edge = edge[np.lexsort((edge, -net.cost_s[edge], -favour[edge]))]
    for side in (net.src, net.dst):
        _, first = np.unique(side[edge], return_index=True)
        edge = edge[np.sort(first)]
    return edge


# ── edges ────────────────────────────────────────────────────────────────────────────────────────


class ReaderPairs(NamedTuple):
    """Distinct (producer, reader) pairs of ops, the edges, sorted by reader, then producer."""

    op_s: FloatArray
    """Per op: seconds on the fastest device."""
    src: IntArray
    dst: IntArray
    cost_s: FloatArray
    """Per edge: mean seconds to send its tensors."""
    in_ptr: LongArray
    """Edges ``in_ptr[i]`` up to ``in_ptr[i + 1]`` end at op i."""
    out_ptr: LongArray
    out_edge: IntArray
    """Edges ``out_edge[out_ptr[i]:out_ptr[i + 1]]`` begin at op i."""


def net_of(problem: Problem) -> ReaderPairs:
    """Return the edges of a problem with op times; an op that no device can run takes 0 s."""
    op_s = problem.costs.op_s[np.unique(problem.costs.device_row)]
    fastest_s = np.min(op_s, axis=0, where=np.isfinite(op_s), initial=np.inf)
    src, dst = problem.graph.edges
    return make_net(np.where(np.isfinite(fastest_s), fastest_s, 0.0), src, dst, _edge_s(problem))


def make_net(op_s: FloatArray, src: IntArray, dst: IntArray, cost_s: FloatArray) -> ReaderPairs:
    """Build the edge tables from edges sorted by reader, then producer."""
    num_ops = len(op_s)
    return ReaderPairs(
        op_s=table(op_s, np.float64),
        src=table(src, np.int32),
        dst=table(dst, np.int32),
        cost_s=table(cost_s, np.float64),
        in_ptr=table(pointers(np.bincount(dst, minlength=num_ops)), np.int64),
        out_ptr=table(pointers(np.bincount(src, minlength=num_ops)), np.int64),
        out_edge=table(np.argsort(src, kind="stable"), np.int32),
    )


def _edge_s(problem: Problem) -> FloatArray:
    """Per edge of the graph: seconds to send all of its tensors."""
    graph = problem.graph
    reader = graph.reader
    producer = graph.tensor_producer[graph.reads].astype(np.int64)
    # Reads of one op ascend, and so do the producers of ascending tensors, so edges are sorted.
    is_first = np.diff(producer, prepend=-1) != 0
    is_first |= np.diff(reader, prepend=-1) != 0
    is_made = producer >= 0
    edge = np.cumsum(is_first & is_made) - 1
    sent_s = mean_transfer_s(problem)[graph.reads[is_made]]
    return summed(edge[is_made], sent_s, len(graph.edges[0]))


def longest_path_s(net: ReaderPairs, favour: FloatArray) -> float:
    """Seconds of the longest path, with every transfer reduced by its favour."""
    sent_s = net.cost_s * (1.0 - favour)
    start_s = np.zeros(len(net.op_s))
    after = table(net.dst[net.out_edge], np.int64)
    longest_from_start(net.out_ptr, after, sent_s[net.out_edge], net.op_s, start_s)
    return float((start_s + net.op_s).max(initial=0.0))


# ── linear programme, solved by HiGHS ────────────────────────────────────────────────────────────

_IDLE_WEIGHT = 0.01
"""Weight of all favours together in the objective, in mean transfers.

A device loses time if it waits for a favourite that no long path needs; the weight sets such
favours to 0.
"""


def optimal_favours(net: ReaderPairs) -> FloatArray | None:
    """Favour per edge that minimises the longest path; None if the solver gives up.

    Variables of the linear programme: the favour of each edge with a transfer, the start of each
    op, the longest path.
    """
    from scipy.optimize import linprog

    favour = np.zeros(len(net.src))
    edge = np.flatnonzero(net.cost_s > 0)
    if not len(edge):
        return favour
    # The solver's tolerances are absolute, so times have to be near 1.
    unit_s = float(net.cost_s[edge].mean())
    num_favours, num_ops = len(edge), len(net.op_s)
    objective = np.zeros(num_favours + num_ops + 1)
    objective[:num_favours] = _IDLE_WEIGHT / num_favours
    objective[-1] = 1.0
    rows, limits = _constraints(net, edge, unit_s)
    bounds = np.zeros((len(objective), 2))
    bounds[:num_favours, 1], bounds[num_favours:, 1] = 1.0, np.inf
    found = linprog(objective, A_ub=rows, b_ub=limits, bounds=bounds, method="highs-ds")
    if found.status != 0:
        return None
    favour[edge] = np.clip(found.x[:num_favours], 0.0, 1.0)
    return favour


def _constraints(net: ReaderPairs, edge: LongArray, unit_s: float) -> tuple[Any, FloatArray]:
    """Return the constraint matrix of the linear programme and its upper limits."""
    from scipy.sparse import vstack

    num_favours, num_ops = len(edge), len(net.op_s)
    width = num_favours + num_ops + 1
    # The reader of each edge starts when the producer has ended and its tensors are sent.
    paths = _rows(
        len(net.src),
        width,
        (np.arange(len(net.src)), num_favours + net.src, 1.0),
        (np.arange(len(net.src)), num_favours + net.dst, -1.0),
        (edge, np.arange(num_favours), -net.cost_s[edge] / unit_s),
    )
    last = np.flatnonzero(np.diff(net.out_ptr) == 0)
    row = np.arange(len(last))
    ends = _rows(len(last), width, (row, num_favours + last, 1.0), (row, width - 1, -1.0))
    sums = [_favour_rows(side[edge], width) for side in (net.src, net.dst)]
    limits = [-(net.op_s[net.src] + net.cost_s) / unit_s, -net.op_s[last] / unit_s]
    limits += [np.ones(rows.shape[0]) for rows in sums]
    return vstack([paths, ends, *sums]).tocsr(), np.concatenate(limits)


def _favour_rows(end: NDArray[np.int32], width: int) -> Any:
    """Constraints that the favours of edges that share an end add up to at most 1."""
    op, row, count = np.unique(end, return_inverse=True, return_counts=True)
    crowded = np.flatnonzero(count > 1)
    number = np.full(len(op), -1)
    number[crowded] = np.arange(len(crowded))
    column = np.flatnonzero(number[row] >= 0)
    return _rows(len(crowded), width, (number[row][column], column, 1.0))


def _rows(height: int, width: int, *parts: tuple[Any, Any, Any]) -> Any:
    """Build a sparse matrix from (row, column, value) parts; a scalar applies to all entries."""
    from scipy.sparse import coo_array

    wide = [np.broadcast_arrays(*part) for part in parts]
    row, column, value = (np.concatenate([part[index] for part in wide]) for index in range(3))
    return coo_array((value.astype(np.float64), (row, column)), shape=(height, width))


# ── descent on a smoothed longest path, after Frank and Wolfe (1956) ─────────────────────────────
#
# Every maximum becomes a log-sum-exp, so that all long paths count and each edge has a flow, the
# share of the long paths that use it. A round finds a heavy matching by the seconds that favours
# would save, and moves favours towards it at the ops that the matching covers; elsewhere nothing is
# lost. The temperature falls from two mean lengths of an edge to a twentieth, since what smoothing
# adds grows with the edges on a path. O(rounds · edges).

_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 2.0, 0.05
"""In units of the mean length of an edge plus its producer on the long paths."""
_MAX_ROUNDS, _MIN_ROUNDS = 300, 30
_TOTAL_EDGES = 36_000_000
"""Approximate limit on edges visited over all rounds; more gains little on the largest graphs."""


def descended_favours(net: ReaderPairs, num_rounds: int | None = None) -> FloatArray:
    """Favours for a short longest path, by descent; ``num_rounds`` defaults by graph size."""
    num_ops, num_edges = len(net.op_s), len(net.src)
    if num_rounds is None:
        num_rounds = int(np.clip(_TOTAL_EDGES // max(num_edges, 1), _MIN_ROUNDS, _MAX_ROUNDS))
    descent = Descent(
        favour=np.zeros(num_edges),
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


_FAR = 30.0
"""Temperatures by which a path must be shorter than the longest to get no flow.

Its fraction of the flow would be below 1e-13.
"""
_NO_FLOW = 1e-9
"""Flow below which an op and the edges into it are skipped."""


class Descent(NamedTuple):
    """Working arrays that each round of the descent overwrites."""

    favour: FloatArray
    """Per edge; the favours into one op add up to at most 1, as do those out of one op."""
    weight: FloatArray
    """Per edge: first its fraction of its reader's soft longest path, then the seconds saved."""
    start_s: FloatArray
    """Per op: soft longest path to its start."""
    flow: FloatArray
    """Per op: fraction of the long paths that run through it."""
    chosen: IntArray
    """Per op: the matched edge out of it, or -1."""
    taken: IntArray
    """Per op: the matched edge into it, or -1."""


@kernel
def _spread(net: ReaderPairs, descent: Descent, temperature_s: float) -> float:
    """Soft longest path to every op, and each edge's fraction of it; returns the longest."""
    start_s, share = descent.start_s, descent.weight
    longest_s = 0.0
    for op in range(len(net.op_s)):
        first, stop = net.in_ptr[op], net.in_ptr[op + 1]
        latest_s = 0.0
        for edge in range(first, stop):
            src = net.src[edge]
            sent_s = net.cost_s[edge] * (1.0 - descent.favour[edge])
            share[edge] = start_s[src] + net.op_s[src] + sent_s
            latest_s = max(latest_s, share[edge])
        total = 0.0
        for edge in range(first, stop):
            below = (share[edge] - latest_s) / temperature_s
            share[edge] = np.exp(below) if below > -_FAR else 0.0
            total += share[edge]
        for edge in range(first, stop):
            share[edge] /= total
        start_s[op] = latest_s + temperature_s * np.log(total) if total > 1.0 else latest_s
        longest_s = max(longest_s, start_s[op] + net.op_s[op])
    return longest_s


@kernel
def _flow_into_ends(
    net: ReaderPairs, descent: Descent, longest_s: float, temperature_s: float
) -> None:
    """Distribute one unit of flow over the ops without readers, by the length of their paths."""
    flow, total = descent.flow, 0.0
    for op in range(len(net.op_s)):
        flow[op] = 0.0
        if net.out_ptr[op] == net.out_ptr[op + 1]:
            below = (descent.start_s[op] + net.op_s[op] - longest_s) / temperature_s
            flow[op] = np.exp(below) if below > -_FAR else 0.0
            total += flow[op]
    for op in range(len(net.op_s)):
        flow[op] /= total


@kernel
def _flow_back(net: ReaderPairs, descent: Descent) -> float:
    """Propagate the flow backward and turn weights into the seconds that full favours would save.

    Returns the mean number of edges of a path.
    """
    flow, weight = descent.flow, descent.weight
    num_edges = 0.0
    for op in range(len(net.op_s) - 1, -1, -1):
        through = flow[op] if flow[op] > _NO_FLOW else 0.0
        for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
            part = through * weight[edge]
            flow[net.src[edge]] += part
            num_edges += part
            weight[edge] = part * net.cost_s[edge]
    return num_edges


@kernel
def _step(net: ReaderPairs, descent: Descent, step: float) -> None:
    """Move the favours of ops that the matching covers towards the matching; leave the others."""
    favour = descent.favour
    for op in range(len(net.op_s)):
        mine = descent.taken[op]
        for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
            if mine >= 0 or descent.chosen[net.src[edge]] >= 0:
                favour[edge] *= 1.0 - step
        if mine >= 0:
            favour[mine] += step


@kernel
def descend(
    net: ReaderPairs, descent: Descent, edge_s: float, temperatures: FloatArray, steps: FloatArray
) -> None:
    """Run one round per temperature and step size, updating the favours in place.

    Temperatures are relative to the mean length of an edge; ``edge_s`` is the initial guess of
    it.
    """
    for index in range(len(temperatures)):
        temperature_s = temperatures[index] * edge_s
        longest_s = _spread(net, descent, temperature_s)
        if longest_s <= 0.0:
            return
        _flow_into_ends(net, descent, longest_s, temperature_s)
        edge_s = longest_s / max(_flow_back(net, descent), 1.0)
        match_heaviest(net, descent.weight, descent.chosen, descent.taken)
        _step(net, descent, steps[index])


@kernel
def _best_offer(net: ReaderPairs, weight: FloatArray, chosen: IntArray, op: int) -> int:
    """Return the heaviest edge into ``op`` that beats its producer's current match; -1 if none."""
    best = -1
    for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
        if weight[edge] <= 0.0 or (best >= 0 and weight[edge] <= weight[best]):
            continue
        rival = chosen[net.src[edge]]
        if rival >= 0 and weight[rival] > weight[edge]:
            continue
        if rival < 0 or weight[rival] < weight[edge] or edge < rival:
            best = edge
    return best


@kernel
def match_heaviest(net: ReaderPairs, weight: FloatArray, chosen: IntArray, taken: IntArray) -> None:
    """Compute the greedy matching: edges from heaviest to lightest, ties in order of number.

    Readers propose to producers, which keep the heaviest edge; a displaced reader proposes to
    another producer (Manne and Halappanavar, 2014). The total weight is at least half of the
    maximum. ``chosen`` gets the edge of each producer, ``taken`` the edge of each reader; -1 for
    none.
    """
    for op in range(len(chosen)):
        chosen[op] = taken[op] = -1
    for op in range(len(chosen)):
        reader = op
        while reader >= 0:
            edge = _best_offer(net, weight, chosen, reader)
            if edge < 0:
                break
            rival = chosen[net.src[edge]]
            chosen[net.src[edge]] = taken[reader] = edge
            reader = -1
            if rival >= 0:
                reader = net.dst[rival]
                taken[reader] = -1


def m_sct(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-SCT and run them in the order in which it starts them."""
    found = favourite_children(problem)
    schedule = list_schedule(problem, found.child, found.spared_s)
    return schedule.added_to(plan, favourites=int((found.child >= 0).sum()))
