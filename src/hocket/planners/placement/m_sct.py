"""m-SCT (small communication times): m-ETF with devices that wait for favourite children.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hanen and
Munier (1995). A linear relaxation selects the edges without transfer (`favourite_children`); a
device that could start the favourite child of its last op before any other device stays awake for
it, and meanwhile runs only ops that every device could start. `list_schedule` states the rules.
O(ops · devices · log(ready ops)) in practice, plus the time to find the favourites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.m_etf import list_schedule
from hocket.planners.shared import longest_from_start, longest_to_end
from hocket.planners.tables import ReaderPairs, net_of

# Favourite children for m-SCT: which reader should follow each op on the same device.
#
# Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors
# with small communication delays", 1995, as used by Jeon et al., "Baechi", SoCC 2020. Every edge
# gets a favour between 0 and 1, the fraction of its transfer that is saved; the favours of the
# edges into an op add up to at most 1, as do those of the edges out of it. The relaxation
# minimises the longest path, and rounding turns large favours into favourites. The relaxation is
# solved as a linear programme. Where that would take long, the favourite of an op is the reader
# that follows it on the longest path, if the op also precedes that reader on the longest path to
# it; on GNMT of 10,000 and 50,000 ops this halves the step that favours close to the optimum of the
# relaxation give. O(edges).


_MAX_LINEAR_EDGES = 3_000
"""Edges with a transfer up to which the linear programme takes less than half a second."""
_LEAST_FAVOUR = 0.5 - 1e-6
"""Favour from which the linear programme's solution is rounded up to a favourite.

Baechi rounds up from one half, or only from nine tenths. Below one half a device more often than
not waits in vain, and the graph of Hanen and Munier takes 42 instead of 36 on two devices.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Favourites:
    """The favourite child of each op."""

    child: IntArray
    """Per op: its favourite child, -1 if none. No op is the favourite of two producers."""
    spared_s: FloatArray
    """Per op: mean seconds of the transfer to its favourite child; 0 if it has none."""


def favourite_children(problem: Problem) -> Favourites:
    """Compute the favourite child of every op of a problem."""
    net = net_of(problem)
    favour = optimal_favours(net) if np.count_nonzero(net.cost_s) <= _MAX_LINEAR_EDGES else None
    if favour is None:
        favour = path_favours(net)
    num_ops = len(net.op_s)
    child, spared_s = np.full(num_ops, -1, dtype=np.int32), np.zeros(num_ops)
    chosen = _rounded(net, favour)
    child[net.src[chosen]], spared_s[net.src[chosen]] = net.dst[chosen], net.cost_s[chosen]
    return Favourites(child=child, spared_s=spared_s)


def _rounded(net: ReaderPairs, favour: FloatArray) -> LongArray:
    """Return the edges rounded up to favourites, at most one out of and one into each op.

    Edges of larger favour come first, then those with the longer transfer.
    """
    edge = np.flatnonzero((favour >= _LEAST_FAVOUR) & (net.cost_s > 0))
    edge = edge[np.lexsort((edge, -net.cost_s[edge], -favour[edge]))]
    for side in (net.src, net.dst):
        _, first = np.unique(side[edge], return_index=True)
        # `np.unique` finds the best edge of each op; sorting restores the order by favour.
        edge = edge[np.sort(first)]
    return edge


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


# ── the longest path, where the linear programme would take long ─────────────────────────────────


def path_favours(net: ReaderPairs) -> FloatArray:
    """Favour 1 for edges that lead the longest path out of their producer and into their reader."""
    after, sent_s = table(net.dst[net.out_edge], np.int64), net.cost_s[net.out_edge]
    from_start_s, to_end_s = np.zeros(len(net.op_s)), np.zeros(len(net.op_s))
    longest_from_start(net.out_ptr, after, sent_s, net.op_s, from_start_s)
    longest_to_end(net.out_ptr, after, sent_s, net.op_s, to_end_s)
    is_favourite = np.ones(len(net.src), dtype=np.bool_)
    for end, path_s in (
        (net.src, net.cost_s + to_end_s[net.dst]),
        (net.dst, from_start_s[net.src] + net.op_s[net.src] + net.cost_s),
    ):
        longest_s = np.zeros(len(net.op_s))
        np.maximum.at(longest_s, end, path_s)
        is_favourite &= path_s >= longest_s[end]
    return is_favourite.astype(np.float64)


def m_sct(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-SCT and run them in the order in which it starts them."""
    found = favourite_children(problem)
    schedule = list_schedule(problem, found.child, found.spared_s)
    return schedule.added_to(plan, favourites=int((found.child >= 0).sum()))
