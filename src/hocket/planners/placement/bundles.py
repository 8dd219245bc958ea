"""Bundles: ops that move together when a model is placed by its forward pass.

A backward op sits with its forward partner, ops of one group sit together, an op that updates a
persistent tensor in place sits with the first op that reads it, a view sits with the first op that
reads its result, and an op of a later phase without any of these follows the op that makes what it
reads. Connected components of these ties. O(ops + reads).
"""

from __future__ import annotations

import numpy as np

from hocket.arrays import ByteArray, IntArray
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase


def bundle_of(graph: Graph) -> IntArray:
    """The bundle of each op, numbered by the first op of each bundle in graph order."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ops = np.arange(graph.num_ops, dtype=np.int32)
    tied = [(ops[graph.partner >= 0], graph.partner[graph.partner >= 0])]
    grouped = np.flatnonzero(graph.group >= 0).astype(np.int32)
    if len(grouped):
        _, first, inverse = np.unique(graph.group[grouped], return_index=True, return_inverse=True)
        tied.append((grouped, grouped[first][inverse]))
    tied.append(_followers(graph))
    tied.append(_updates(graph))
    tied.append(_views(graph))
    rows = np.concatenate([a for a, _ in tied])
    cols = np.concatenate([b for _, b in tied])
    matrix = coo_array(
        (np.ones(len(rows), dtype=bool), (rows, cols)), (graph.num_ops, graph.num_ops)
    )
    _, label = connected_components(matrix, directed=False)
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[inverse].astype(np.int32)


def anchor_of(graph: Graph, bundle: IntArray) -> IntArray:
    """Per bundle, the op that stands for it in the order of the forward pass.

    That is its first forward op that does work: views of parameters and backward ops can be ready
    long before, which says nothing about where in the model the bundle belongs.
    """
    is_forward = graph.op_phase == Phase.FORWARD
    rank = np.where(is_forward & graph.works, 0, np.where(is_forward, 1, 2))
    order = np.lexsort((np.arange(graph.num_ops), rank, bundle))
    _, first = np.unique(bundle[order], return_index=True)
    anchors: IntArray = order[first].astype(np.int32)
    return anchors


def _followers(graph: Graph) -> tuple[IntArray, IntArray]:
    """Later ops without partner or group, each with the maker of the largest tensor it reads."""
    loose = (graph.op_phase != Phase.FORWARD) & (graph.partner < 0) & (graph.group < 0)
    follower, leader = [], []
    for op in np.flatnonzero(loose).tolist():
        made = [t for t in graph.reads_of(op) if graph.tensor_producer[t] >= 0]
        if made:
            largest = max(made, key=lambda t: (int(graph.tensor_bytes[t]), -int(t)))
            follower.append(op)
            leader.append(int(graph.tensor_producer[largest]))
    return np.array(follower, dtype=np.int32), np.array(leader, dtype=np.int32)


def _updates(graph: Graph) -> tuple[IntArray, IntArray]:
    """Ops that write a tensor that exists before the step, each with the tensor's first reader."""
    root, before = graph.root_of, graph.tensor_producer < 0
    first_reader = np.full(graph.num_tensors, graph.num_ops)
    read = np.flatnonzero(before & (np.diff(graph.user_ptr) > 0))
    np.minimum.at(first_reader, root[read], graph.users[graph.user_ptr[read]])
    is_update = np.isin(graph.tensor_role, PERSISTENT_ROLES) & ~before & before[root]
    updates = np.flatnonzero(is_update)
    return graph.tensor_producer[updates], first_reader[root[updates]].astype(np.int32)


def _views(graph: Graph) -> tuple[IntArray, IntArray]:
    """Forward ops that do no work, each with the first op that reads its result.

    Alone they would be placed as soon as they are ready, which for views of parameters is before
    everything else and far from where they are used.
    """
    is_idle = (graph.op_phase == Phase.FORWARD) & ~graph.works
    made = np.flatnonzero((graph.tensor_producer >= 0) & (np.diff(graph.user_ptr) > 0))
    made = made[is_idle[graph.tensor_producer[made]]]
    # Tensors stand in the order of their producers, so the first of each op comes first.
    viewer, first = np.unique(graph.tensor_producer[made], return_index=True)
    return viewer, graph.users[graph.user_ptr[made[first]]]


def op_memory_bytes(graph: Graph) -> ByteArray:
    """Bytes that each op brings along: what it makes, its workspace, what it is first to read.

    Nothing is ever freed in this measure, as in Baechi's m-TOPO.
    """
    need = graph.workspace_bytes.astype(np.int64).copy()
    made = graph.tensor_producer >= 0
    np.add.at(need, graph.tensor_producer[made], graph.held_bytes[made])
    counts = np.diff(graph.user_ptr)
    before = np.flatnonzero(~made & (counts > 0))
    np.add.at(need, graph.users[graph.user_ptr[before]], graph.held_bytes[before])
    return need
