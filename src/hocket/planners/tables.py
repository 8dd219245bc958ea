"""A problem in the form that compiled planners read: tuples of arrays.

`task_table` has ops, tensors and routes; `net_of` has the distinct edges between ops with mean
transfer times. Both are computed once per problem.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers
from hocket.graph.graph import Role
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.shared import once_per_problem
from hocket.simulate.load import summed


class TaskTable(NamedTuple):
    """Ops, tensors and routes of a problem.

    An uncontended transfer of tensor t from a to b takes ``latency_s[a, b] + work[t] * unit_s[a,
    b]`` seconds.
    """

    op_s: FloatArray
    """[device, op]: seconds; infinite if the op cannot run there."""
    workspace_bytes: LongArray
    read_ptr: LongArray
    reads: LongArray
    made_ptr: LongArray
    producer: LongArray
    """Per tensor: the op that makes it; -1 if it exists before the step."""
    user_ptr: LongArray
    users: LongArray
    """Ops that read tensor t: ``users[user_ptr[t]:user_ptr[t + 1]]``, ascending."""
    held_bytes: LongArray
    """Per tensor: bytes of storage allocated for it; 0 for aliases."""
    copy_bytes: LongArray
    """Per tensor: bytes of a copy on another device."""
    is_held: BoolArray
    """Per tensor: True if it is held until the end of the step."""
    is_everywhere: BoolArray
    """Per tensor: True for the batch, which is on every device at no cost."""
    work: FloatArray
    """Per tensor: bytes to transfer, or stated seconds per link."""
    latency_s: FloatArray
    """[src, dst]: seconds; 0 on the diagonal."""
    unit_s: FloatArray
    """[src, dst]: seconds per unit of work; 0 on the diagonal."""
    send_queue: LongArray
    receive_queue: LongArray
    memory_bytes: LongArray
    """Usable bytes per device."""


@once_per_problem
def task_table(problem: Problem) -> TaskTable:
    """Build the table of a problem."""
    graph, costs = problem.graph, problem.costs
    routes = costs.routes
    stated = costs.tensor_s is not None
    # Stated times are per link crossed; otherwise the narrowest link of the route decides.
    unit_s = routes.hops.astype(np.float64) if stated else 1 / routes.bandwidth_bps
    work = costs.tensor_s if costs.tensor_s is not None else costs.tensor_bytes
    before = graph.tensor_producer < 0
    return TaskTable(
        op_s=table(costs.op_s[costs.device_row], np.float64),
        workspace_bytes=table(graph.workspace_bytes, np.int64),
        read_ptr=table(graph.read_ptr, np.int64),
        reads=table(graph.reads, np.int64),
        made_ptr=table(graph.made_ptr, np.int64),
        producer=table(graph.tensor_producer, np.int64),
        user_ptr=table(graph.user_ptr, np.int64),
        users=table(graph.users, np.int64),
        held_bytes=table(graph.held_bytes, np.int64),
        copy_bytes=table(graph.tensor_bytes, np.int64),
        is_held=table(graph.is_held, np.bool_),
        is_everywhere=table(before & (graph.tensor_role == Role.INPUT), np.bool_),
        work=table(work, np.float64),
        latency_s=table(routes.latency_s, np.float64),
        unit_s=table(unit_s, np.float64),
        send_queue=table(routes.send_queue, np.int64),
        receive_queue=table(routes.receive_queue, np.int64),
        memory_bytes=table(problem.memory_bytes, np.int64),
    )


def mean_transfer_s(problem: Problem) -> FloatArray:
    """Per tensor: seconds of a transfer, averaged over all pairs of different devices."""
    num = problem.cluster.num_devices
    if num < 2:
        return np.zeros(problem.graph.num_tensors)
    tasks = task_table(problem)
    pairs = num * (num - 1)
    latency_s, unit_s = tasks.latency_s.sum() / pairs, tasks.unit_s.sum() / pairs
    seconds: FloatArray = np.where(tasks.is_everywhere, 0.0, latency_s + tasks.work * unit_s)
    return seconds


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


@once_per_problem
def net_of(problem: Problem) -> ReaderPairs:
    """Return the edges of a problem with op times; an op that no device can run takes 0 s."""
    # Device types without a device are listed in the costs but must not count as fastest.
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
