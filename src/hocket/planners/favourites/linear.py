"""Favours from a linear programme, solved to the optimum by HiGHS.

Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors with
small communication delays", 1995. Every edge has a favour between 0 and 1 that cuts its transfer by
that share, the favours at either side of an op are 1 in all at most, and the longest path is to be
short. Variables are the open favours, the start of each op and the longest path; rows are the edges
and the ops with several open edges on a side. Polynomial; seconds above a few thousand edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, LongArray
from hocket.planners.favourites.net import ReaderPairs


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
    crowds = [_crowd_rows(side[open_edge], width) for side in (net.src, net.dst)]
    sent_s = np.where(net.is_free, 0.0, net.cost_s)
    limits = [-(net.op_s[net.src] + sent_s) / unit_s, -net.op_s[last] / unit_s]
    limits += [np.ones(crowd.shape[0]) for crowd in crowds]
    return vstack([paths, ends, *crowds]).tocsr(), np.concatenate(limits)


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


def _crowd_rows(end: NDArray[np.int32], width: int) -> Any:
    """At most one favour in all for each op at which several open edges come together."""
    op, row, count = np.unique(end, return_inverse=True, return_counts=True)
    crowded = np.flatnonzero(count > 1)
    number = np.full(len(op), -1)
    number[crowded] = np.arange(len(crowded))
    column = np.flatnonzero(number[row] >= 0)
    return _rows(len(crowded), width, (number[row][column], column, 1.0))


def _rows(height: int, width: int, *parts: tuple[Any, Any, Any]) -> Any:
    """A sparse matrix of parts (row, column, value), where one value may stand for all."""
    from scipy.sparse import coo_array

    wide = [np.broadcast_arrays(*part) for part in parts]
    row, column, value = (np.concatenate([part[index] for part in wide]) for index in range(3))
    return coo_array((value.astype(np.float64), (row, column)), shape=(height, width))
