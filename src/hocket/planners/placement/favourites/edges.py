"""Edges between ops with their transfer times, in the forms that the solvers need."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray
from hocket.compiled.containers import table
from hocket.plan.problem import Problem
from hocket.planners.tables import mean_transfer_s


class Edges(NamedTuple):
    """Ops in topological order and the edges between them, by (dst, src)."""

    op_s: FloatArray
    """Per op: seconds on the device that is fastest for it."""
    src: ByteArray
    dst: ByteArray
    cost_s: FloatArray
    """Per edge: seconds to move its tensors, averaged over pairs of devices."""
    in_ptr: ByteArray
    """Edges into op i: from ``in_ptr[i]`` up to ``in_ptr[i + 1]``."""
    out_ptr: ByteArray
    out: ByteArray
    """Edges out of op i: ``out[out_ptr[i]:out_ptr[i + 1]]``."""


def edges_of(problem: Problem) -> Edges:
    """The edges of a problem; the tensors of an edge are counted together."""
    graph = problem.graph
    width = max(graph.num_ops, 1)
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.read_ptr))
    producer = graph.tensor_producer[graph.reads]
    made = np.flatnonzero(producer >= 0)
    # Reads stand by reader and tensor, tensors by producer: the keys are sorted already.
    key = reader[made] * width + producer[made]
    is_new = np.diff(key, prepend=-1) > 0
    transfer_s = mean_transfer_s(problem)[graph.reads[made]]
    cost_s = np.bincount(np.cumsum(is_new) - 1, weights=transfer_s, minlength=int(is_new.sum()))
    seconds = problem.costs.op_s[np.unique(problem.costs.device_row)].min(axis=0)
    op_s = np.where(np.isfinite(seconds), seconds, 0.0)
    return make_edges(op_s, key[is_new] % width, key[is_new] // width, cost_s)


def make_edges(op_s: FloatArray, src: ByteArray, dst: ByteArray, cost_s: FloatArray) -> Edges:
    """Edges that are sorted by (dst, src), with the ways to find them from either end."""
    ends = np.arange(len(op_s) + 1)
    out = np.argsort(src, kind="stable")
    return Edges(
        op_s=table(op_s, np.float64),
        src=table(src, np.int64),
        dst=table(dst, np.int64),
        cost_s=table(cost_s, np.float64),
        in_ptr=table(np.searchsorted(dst, ends), np.int64),
        out_ptr=table(np.searchsorted(src[out], ends), np.int64),
        out=table(out, np.int64),
    )


def only_edges(edges: Edges) -> NDArray[np.bool_]:
    """Per edge: whether it is the only one on both its ends, and so a favourite at no price."""
    num_out, num_in = np.diff(edges.out_ptr), np.diff(edges.in_ptr)
    alone: NDArray[np.bool_] = (num_out[edges.src] == 1) & (num_in[edges.dst] == 1)
    return alone
