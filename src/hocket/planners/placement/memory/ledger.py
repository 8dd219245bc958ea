"""Memory ledger: bytes that each device holds over time, updated as ops move.

Time is an axis of instants, the starts of the ops in a given run of the step. While that axis stays
as it is, placing an op changes a few spans of bytes, and a tree over the axis gives the peak of
each device at once: a move costs O(spans · log instants) where simulating costs the whole step. The
ledger counts as the simulator does (see ``docs/concepts/simulator.md``), except that a tensor is
in flight for as long as it was in that run, and that a view which exists before the step counts as
the tensor that it views.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, LongArray, pointers, positions
from hocket.graph.graph import Graph
from hocket.kernels.containers import Marks, new_marks, table
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline

MAX_LEAVES = 2**20
"""Leaves of the trees of all devices together; beyond, several instants share one. 32 MiB."""


class InstantSpans(NamedTuple):
    """When, on the axis of instants, ops run and tensors are in flight."""

    first: LongArray
    last: LongArray
    """First and last instant of each op."""
    sent: LongArray
    """Per tensor: last instant at which it is being sent; -1 where it is not."""
    num_instants: int
    """A power of two."""


class LedgerTable(NamedTuple):
    """Constant data of the ledger, in addition to the planners' `TaskTable`."""

    first: LongArray
    last: LongArray
    sent: LongArray
    """See `InstantSpans`."""
    uses: LongArray
    """As ``TaskTable.reads``, but a view that exists before the step is replaced by its storage."""
    alias_of: LongArray
    num_bytes: LongArray
    owner_op: LongArray
    """Per tensor from before the step: the op on whose device it lives; -1 for others."""
    root: LongArray
    """Per tensor: the first of its family, the tensors that share its storage."""
    family_ptr: LongArray
    family: LongArray
    """The family of root r: ``family[family_ptr[r]:family_ptr[r + 1]]``, ascending."""


class MemoryLedger(NamedTuple):
    """State of the ledger that changes when ops move."""

    device_of: LongArray
    """Per op; -1 while it is nowhere."""
    end: IntArray
    """[tensor, device]: last instant at which the tensor is needed there; -1 where it is not."""
    top: LongArray
    """[device, node]: most bytes below each node of the device's tree; node 1 is the whole."""
    pending: LongArray
    """[device, node]: bytes added to all leaves below the node."""
    touched: Marks
    """Roots of the families that a move concerns."""


def spans_in_graph_order(problem: Problem) -> InstantSpans:
    """The axis of a run that takes one op after another, as the graph lists them."""
    position = np.arange(problem.graph.num_ops, dtype=np.int64)
    sent = np.full(problem.graph.num_tensors, -1)
    return _merged(InstantSpans(position, position, sent, len(position)), problem)


def spans_of_run(problem: Problem, timeline: Timeline) -> InstantSpans:
    """Spans of ops and transfers in a simulated run; each start of an op is an instant."""
    order = np.argsort(timeline.op_start_s, kind="stable")
    start_s = timeline.op_start_s[order]
    first = positions(order)
    last = np.maximum(first, np.searchsorted(start_s, timeline.op_end_s) - 1)
    sent = np.full(problem.graph.num_tensors, -1)
    arrived = np.searchsorted(start_s, timeline.transfer_end_s) - 1
    np.maximum.at(sent, timeline.transfer_tensor, arrived)
    return _merged(InstantSpans(first, last, sent, len(order)), problem)


def _merged(spans: InstantSpans, problem: Problem) -> InstantSpans:
    """The spans on at most as many instants as the trees may have."""
    most = max(2, MAX_LEAVES // problem.cluster.num_devices)
    num_instants = 1 << max(1, (max(spans.num_instants, 1) - 1).bit_length())
    shift = 0
    while num_instants >> shift > most:
        shift += 1
    return InstantSpans(
        spans.first >> shift, spans.last >> shift, spans.sent >> shift, num_instants >> shift
    )


def ledger_table(graph: Graph, spans: InstantSpans) -> LedgerTable:
    """The table of a graph on an axis."""
    before, root = graph.tensor_producer < 0, graph.root_of
    stands_for = np.where(before, root, np.arange(graph.num_tensors))
    sizes = np.bincount(root, minlength=graph.num_tensors)
    return LedgerTable(
        first=table(spans.first, np.int64),
        last=table(spans.last, np.int64),
        sent=table(spans.sent, np.int64),
        uses=table(stands_for[graph.reads], np.int64),
        alias_of=table(
            np.where(before | (graph.alias_of < 0), -1, stands_for[graph.alias_of]), np.int64
        ),
        num_bytes=table(graph.tensor_bytes, np.int64),
        owner_op=table(owner_ops(graph), np.int64),
        root=table(root, np.int64),
        family_ptr=table(pointers(sizes), np.int64),
        family=table(np.argsort(root, kind="stable"), np.int64),
    )


def owner_ops(graph: Graph) -> IntArray:
    """Per tensor from before the step: the first op that reads its storage; -1 for others."""
    return np.where(graph.tensor_producer < 0, graph.owner_op, -1)


def unread_bytes(problem: Problem) -> LongArray:
    """Per device: bytes of tensors that are there before the step though nothing reads them."""
    graph = problem.graph
    unread = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    unread[0] = graph.held_bytes[graph.owner_op < 0].sum()
    return unread


def new_ledger(graph: Graph, num_devices: int, num_instants: int) -> MemoryLedger:
    """A ledger in which no op is anywhere."""
    return MemoryLedger(
        device_of=np.full(graph.num_ops, -1, dtype=np.int64),
        end=np.full((graph.num_tensors, num_devices), -1, dtype=np.int32),
        top=np.zeros((num_devices, 2 * num_instants), dtype=np.int64),
        pending=np.zeros((num_devices, 2 * num_instants), dtype=np.int64),
        touched=new_marks(graph.num_tensors),
    )


def clear(ledger: MemoryLedger) -> None:
    """Take every op off its device."""
    ledger.device_of.fill(-1)
    ledger.end.fill(-1)
    ledger.top.fill(0)
    ledger.pending.fill(0)
