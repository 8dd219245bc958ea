"""Fusion: neighbouring ops of the same unit and phase become one node, without making a cycle.

The nodes come from `contract`. Tensors that never leave their node disappear; the rest of a storage
made in a node becomes one tensor with the bytes of that storage. If a unit remains several nodes
(at least its forward and its backward ops do), the coarse graph's ``group`` ties them. O((ops +
reads) log reads) in numpy.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.graph.coarsen.contract import Edges, contracted, in_order, joined_ends
from hocket.graph.coarsen.nodes import Coarse, Nodes
from hocket.graph.coarsen.storages import StorageParts, legal_roles
from hocket.graph.graph import Graph, Phase, read_table


def fuse(graph: Graph, unit_of: IntArray, op_s: FloatArray) -> Coarse:
    """Return the graph with neighbouring ops of the same unit and phase fused.

    ``op_s`` are seconds per op; they only decide which op gives a node its name.
    """
    nodes = _fused(graph, unit_of)
    return graph_of_nodes(nodes, op_s, unit_groups(nodes, unit_of))


def graph_of_nodes(nodes: Nodes, op_s: FloatArray, group: IntArray) -> Coarse:
    """Return the graph with one op per node; nodes must be in a topological order."""
    graph, parts = nodes.fine, StorageParts(nodes)
    keep = parts.kept()
    number = np.where(keep, np.cumsum(keep) - 1, -1)
    tensor_of = parts.sent_as(number)
    kept = np.flatnonzero(keep)
    base, num_bytes = parts.base()[kept], parts.num_bytes()[kept]
    chief, maker = parts.chief()[kept], parts.maker[kept]
    tensor_read = tensor_of[graph.reads[parts.crossing]]
    read_ptr, reads = read_table(
        nodes.reader[parts.crossing], tensor_read, nodes.num_nodes, len(kept)
    )
    live = nodes.live_bytes(~keep[parts.part_of])
    coarse = Graph(
        **nodes.op_columns(op_s),
        workspace_bytes=nodes.most(live, np.ones(graph.num_ops, dtype=np.bool_)),
        partner=_partners(nodes),
        group=group,
        tensor_names=tuple(graph.tensor_names[t] for t in chief.tolist()),
        tensor_bytes=num_bytes,
        tensor_role=legal_roles(graph.tensor_role[chief], maker >= 0, base, num_bytes),
        tensor_producer=maker.astype(np.int32),
        alias_of=np.where(base >= 0, number[base], -1).astype(np.int32),
        read_ptr=read_ptr,
        reads=reads,
        stated=nodes.stated(tensor_of, len(kept)),
        meta=nodes.meta(),
    )
    return Coarse(coarse, nodes.node_of, tensor_of, np.ones(len(kept), dtype=np.int32))


def _fused(graph: Graph, unit_of: IntArray) -> Nodes:
    edges = Edges(*(ends.astype(np.int64) for ends in graph.edges))
    label = unit_of.astype(np.int64) * len(Phase) + graph.op_phase
    part = joined_ends(edges, label, graph.op_phase == Phase.OPTIMIZER)
    inner = edges
    if np.all(graph.op_phase[edges.src] <= graph.op_phase[edges.dst]):
        # No edge leads back to an earlier phase, and each node has one phase, so every cycle of
        # nodes lies within a phase: edges to later phases need not be considered.
        is_inner = graph.op_phase[edges.src] == graph.op_phase[edges.dst]
        inner = Edges(edges.src[is_inner], edges.dst[is_inner])
    part = contracted(part, inner, label)
    node_of = in_order(part, edges)
    return Nodes(graph, node_of.astype(np.int32), int(node_of.max(initial=-1)) + 1)


def unit_groups(nodes: Nodes, unit_of: IntArray) -> IntArray:
    """Per node: its unit if the unit has several nodes, else -1."""
    unit = unit_of[nodes.order[nodes.starts]]
    count = np.bincount(unit, minlength=1)
    return np.where(count[unit] > 1, unit, -1).astype(np.int32)


def _partners(nodes: Nodes) -> IntArray:
    """Per node: the node that contains the partner of its first op with a partner."""
    op = nodes.first_with(nodes.fine.partner >= 0)
    partner = np.append(nodes.node_of, -1)[np.append(nodes.fine.partner, -1)[op]]
    return np.where(op >= 0, partner, -1).astype(np.int32)
