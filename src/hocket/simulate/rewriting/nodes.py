"""The backward pass as autograd runs it, node by node and module call by module call.

A node has the backward ops of one forward op. It holds all tensors that its ops read until the last
of them has run, except in sums with gradients of other branches, which autograd's engine adds
itself. The pass enters a module call at the call's first backward op, when it has left all later
calls. O(ops + reads), numpy.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray, pointers
from hocket.graph.graph import Graph, Phase
from hocket.simulate.rewriting.module_calls import OUTSIDE

_SUM = "aten.add"


class BackwardNodes(NamedTuple):
    """Autograd nodes of a step, and the tensors that they hold."""

    end: LongArray
    """Per op: the last op of its node, without sums of other branches; the op itself if it is in no
    node."""
    held_ptr: LongArray
    held: LongArray
    """Per op, between pointers ``held_ptr``: tensors that are held until it ends, besides its
    inputs."""


class Happening(Enum):
    """Type of event between two ops of the backward pass."""

    ENTERED = "the pass enters a module call"
    ASKED = "it unpacks the first tensor that the call saved"
    USED = "all tensors that the call saved were read"


class PassTurn(NamedTuple):
    """An event of a module call, before the op at this position."""

    at: int
    module_call: int
    what: Happening


def find_nodes(graph: Graph, given: LongArray) -> BackwardNodes:
    """Return the nodes of a step's backward pass.

    ``given`` are pairs of a forward op and a tensor that is held until the op has run.
    """
    ops = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    partner = graph.partner[ops]
    # A node is a run of backward ops with the same forward op; ops without one are nodes alone.
    first = np.flatnonzero(np.diff(partner, prepend=-2) | (partner < 0))
    node = np.cumsum(np.isin(np.arange(len(ops)), first)) - 1
    is_own = ~_trailing_sums(graph, ops, node)
    last = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(last, node[is_own], ops[is_own])
    end = np.arange(graph.num_ops)
    end[ops[is_own]] = last[node[is_own]]
    reader = graph.reader
    is_held = end[reader] != reader
    of_nodes = np.stack([end[reader[is_held]], graph.reads[is_held]], axis=1)
    pairs = np.unique(np.concatenate([given, of_nodes]), axis=0)
    counts = np.bincount(pairs[:, 0], minlength=graph.num_ops)
    return BackwardNodes(end, pointers(counts), pairs[:, 1])


def _trailing_sums(graph: Graph, ops: LongArray, node: LongArray) -> BoolArray:
    """Per backward op: True for an addition that only additions follow in its autograd node.

    The first op of a node is never one.
    """
    is_sum = np.array([graph.kind_of(op) == _SUM for op in ops.tolist()], dtype=np.bool_)
    is_first = np.diff(node, prepend=-1) > 0
    others = np.where(is_sum & ~is_first, -1, np.arange(len(ops)))
    last_other = np.full(int(node.max(initial=-1)) + 1, -1)
    np.maximum.at(last_other, node, others)
    return np.arange(len(ops)) > last_other[node]


def find_turns(
    ops: LongArray, call_of: IntArray, nodes: BackwardNodes, reads_saved: BoolArray, before: int
) -> list[PassTurn]:
    """Return events of module calls in a range of backward ops.

    The pass has left the calls from ``before`` on.
    """
    module_call = call_of[ops].astype(np.int64)
    inside = np.where(module_call == OUTSIDE, before, module_call)
    # The lowest call entered so far: entering a lower one means that the pass has left it.
    lowest = np.minimum.accumulate(np.append(before, inside))[:-1]
    turns = []
    for at in np.flatnonzero(inside < lowest).tolist():
        number = int(module_call[at])
        turns.append(PassTurn(at, number, Happening.ENTERED))
        asking = np.flatnonzero((module_call == number) & reads_saved[ops])
        if len(asking):
            end = int(np.searchsorted(ops, nodes.end[ops[asking[-1]]])) + 1
            turns += [PassTurn(int(asking[0]), number, Happening.ASKED),
                      PassTurn(end, number, Happening.USED)]  # fmt: skip
    return sorted(turns, key=lambda turn: turn.at)
