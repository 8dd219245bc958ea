"""The relaxation of favourite children as a linear programme, solved by HiGHS.

Minimise the makespan W over shares y and start times s, with s_u + p_u + c_e (1 - y_e) <= s_v along
every edge, s + p <= W at the sinks and at most one share per op on either side. Edges that are
alone on both ends have share 1 beforehand. Times are divided by their mean so that coefficients are
near 1: with seconds or microseconds the solver has called feasible problems infeasible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray
from hocket.planners.placement.favourites.edges import Edges, only_edges


def solve_linear(edges: Edges) -> FloatArray | None:
    """The optimal share of each edge; None where the solver gives up."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    num_ops, num_edges = len(edges.op_s), len(edges.src)
    if not num_edges:
        return np.zeros(0)
    scale_s = float(np.mean(edges.cost_s[edges.cost_s > 0])) if edges.cost_s.any() else 1.0
    op_times, cost_times = edges.op_s / scale_s, edges.cost_s / scale_s
    alone, each = only_edges(edges), np.arange(num_edges)
    width = num_edges + num_ops + 1

    def rows(count: int, *parts: tuple[ByteArray, ByteArray, FloatArray | float]) -> csr_array:
        row, column, value = zip(*parts, strict=True)
        values = [np.broadcast_to(v, np.shape(r)) for r, v in zip(row, value, strict=True)]
        entries = (np.concatenate(values), (np.concatenate(row), np.concatenate(column)))
        return csr_array(entries, shape=(count, width))

    paths = rows(
        num_edges,
        (each, each, -cost_times),
        (each, num_edges + edges.src, 1.0),
        (each, num_edges + edges.dst, -1.0),
    )
    sinks = np.flatnonzero(np.diff(edges.out_ptr) == 0)
    number = np.arange(len(sinks))
    ends = rows(
        len(sinks),
        (number, num_edges + sinks, 1.0),
        (number, np.full(len(sinks), width - 1), -1.0),
    )
    shares = [
        rows(num_ops, (end[~alone], each[~alone], 1.0)) for end in (edges.src, edges.dst)
    ]  # fmt: skip
    result = linprog(
        np.arange(width) == width - 1,
        A_ub=vstack([paths, ends, *shares]),
        b_ub=np.concatenate(
            (-op_times[edges.src] - cost_times, -op_times[sinks], np.ones(2 * num_ops))
        ),
        bounds=_bounds(alone, width),
        method="highs-ds",
    )
    return None if result.x is None else np.clip(result.x[:num_edges], 0.0, 1.0)


def _bounds(alone: NDArray[np.bool_], width: int) -> FloatArray:
    bounds = np.zeros((width, 2))
    bounds[:, 1] = np.inf
    bounds[: len(alone)] = np.column_stack((alone, np.ones(len(alone))))
    return bounds
