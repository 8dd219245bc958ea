"""A captured step as ops that can run again, for recompute alone.

Every op but views is one, in the graph's order; updates come as soon as what they read is made, so
that gradients do not wait for each other. Of several storages that an op makes the largest may go
and come again, and the others stay until they are read for the last time. What is written in place
is not made again, and who read it before does not run again once it is written, but for buffers,
such as statistics, which are written once. Results that last and that no update uses up are read
by an op behind all others, which takes the time of views. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.planners.memory.recompute import OpGraph


def step_ops(graph: Graph, op_s: FloatArray) -> OpGraph:
    """The ops of a step on one device, where each takes so many seconds."""
    order = _order(graph)
    count = len(order)
    place = np.full(graph.num_ops, -1)
    place[order] = np.arange(count)
    main = _largest(graph)
    reads: list[set[int]] = [set() for _ in range(count + 1)]
    readers: dict[int, set[int]] = defaultdict(set)
    """By storage."""
    for op in order.tolist():
        for root in graph.root_of[graph.reads_of(op)].tolist():
            readers[root].add(int(place[op]))
            owner = int(graph.tensor_producer[root])
            if owner >= 0 and main[owner] == root:
                reads[place[op]].add(int(place[owner]))
    last_turn = np.full(count + 1, count + 1)
    for op, storage in _writes(graph):
        writer, owner = int(place[op]), int(graph.tensor_producer[storage])
        last_turn[[writer, *([place[owner]] if owner >= 0 else [])]] = 0
        earlier = [reader for reader in readers[storage] if reader < writer]
        last_turn[earlier] = np.minimum(last_turn[earlier], writer)
    output_bytes, beside_bytes = np.zeros((2, count + 1), dtype=np.int64)
    lasts = _lasts(graph)
    for storage in np.flatnonzero((graph.tensor_producer >= 0) & (graph.held_bytes > 0)).tolist():
        op, num_bytes = int(graph.tensor_producer[storage]), int(graph.held_bytes[storage])
        if main[op] == storage:
            output_bytes[place[op]] = num_bytes
            reads[count].update([int(place[op])] if lasts[storage] else [])
            continue
        users = sorted(readers[storage])
        last = count if lasts[storage] else max(users, default=int(place[op]))
        beside_bytes[place[op] : last + 1] += num_bytes
        last_turn[users] = np.minimum(last_turn[users], last)
    return OpGraph.of(
        np.append(op_s[order], op_s[graph.only_looks].sum()), output_bytes, reads,
        work_bytes=np.append(graph.workspace_bytes[order].astype(np.int64), 0),
        beside_bytes=beside_bytes, last_turn=last_turn,
    )  # fmt: skip


def _largest(graph: Graph) -> LongArray:
    """Per op the largest storage that it makes; -1 without any."""
    found = np.full(graph.num_ops, -1)
    made = np.flatnonzero((graph.tensor_producer >= 0) & (graph.held_bytes > 0))
    by_size = made[np.argsort(graph.held_bytes[made], kind="stable")]
    found[graph.tensor_producer[by_size]] = by_size
    return found


def _writes(graph: Graph) -> list[tuple[int, int]]:
    """Ops and storages that they write in place, but for buffers."""
    made = np.flatnonzero((graph.tensor_producer >= 0) & (graph.alias_of >= 0))
    found = [(int(graph.tensor_producer[t]), int(graph.root_of[t])) for t in made]
    return [
        (op, root)
        for op, root in found
        if not graph.only_looks[op] and graph.tensor_role[root] != Role.BUFFER
    ]


def _lasts(graph: Graph) -> BoolArray:
    """Per tensor: whether it stays to the end, and no update uses it up."""
    is_used_up = np.zeros(graph.num_tensors, dtype=np.bool_)
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        is_used_up[graph.root_of[graph.reads_of(op)]] = True
    found: BoolArray = graph.is_held & ~is_used_up
    return found


def _order(graph: Graph) -> LongArray:
    """Ops that are no views; each update stands behind the last op that it reads."""
    behind = np.arange(graph.num_ops)
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        makers = graph.tensor_producer[graph.reads_of(op)]
        behind[op] = behind[makers[makers >= 0]].max(initial=-1)
    # The sort is stable: what stands behind the same op keeps its order.
    order = np.argsort(behind, kind="stable")
    found: LongArray = order[~graph.only_looks[order]]
    return found
