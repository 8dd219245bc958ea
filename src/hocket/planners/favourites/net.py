"""The edges between ops and what they cost, as arrays that compiled code reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.tables import mean_transfer_s
from hocket.simulate.load import summed


class ReaderPairs(NamedTuple):
    """Distinct (producer, reader) pairs of ops, in order of reader then producer."""

    op_s: FloatArray
    """Per op: seconds on the device that is fastest at it."""
    src: IntArray
    dst: IntArray
    cost_s: FloatArray
    """Per edge: mean seconds to send what it carries."""
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
    """Per edge of the graph: seconds to send every tensor that it carries."""
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
