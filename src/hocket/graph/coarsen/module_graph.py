"""Merge a graph of ops into one of modules: consecutive ops of a module and phase become one op.

Only consecutive ops are merged, so the result has no cycles. O((ops + reads) log reads) in
numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hocket.graph.coarsen.fuse import graph_of_nodes
from hocket.graph.coarsen.nodes import Nodes
from hocket.graph.coarsen.ties import Ties
from hocket.graph.coarsen.units import joined
from hocket.graph.graph import Graph, Phase


def merge_modules(graph: Graph, class_names: Mapping[str, str]) -> Graph:
    """Return the graph with one op per run of ops of a module; class names are by module path."""
    module, phase = graph.op_module, graph.op_phase
    # Updates stay separate: each one belongs to its parameter.
    is_same = (module[1:] == module[:-1]) & (phase[1:] == phase[:-1])
    is_same &= phase[1:] != Phase.OPTIMIZER
    # A node starts wherever module or phase changes.
    node_of = np.cumsum(np.append(False, ~is_same)[: graph.num_ops]).astype(np.int32)
    nodes = Nodes(graph, node_of, int(node_of.max(initial=-1)) + 1)
    coarse = graph_of_nodes(nodes, graph.flops, _groups(nodes)).graph
    names, kinds = [], []
    count: Counter[str] = Counter()
    for op in range(coarse.num_ops):
        name, kind = coarse.op_names[op], coarse.kind_of(op)
        if coarse.op_phase[op] != Phase.OPTIMIZER:
            path = coarse.module_of(op)
            name = path or "model"
            name += ".backward" if coarse.op_phase[op] == Phase.BACKWARD else ""
            kind = f"module.{class_names.get(path, 'Module')}"
        names.append(f"{name}:{count[name]}" if count[name] else name)
        kinds.append(kind)
        count[name] += 1
    known = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return replace(
        coarse,
        op_names=tuple(names),
        kinds=tuple(known),
        op_kind=np.array([known[kind] for kind in kinds], dtype=graph.op_kind.dtype),
        # A signature describes one op, so merged ops have none.
        signatures=(),
        op_signature=np.full(coarse.num_ops, -1, dtype=np.int32),
    )


def _groups(nodes: Nodes) -> np.typing.NDArray[np.int32]:
    """Per node: colocation group of its ops; groups that share a node are joined."""
    ops = np.flatnonzero(nodes.fine.group >= 0)
    first = np.zeros(int(nodes.fine.group.max(initial=-1)) + 1, dtype=np.int64)
    first[nodes.fine.group[ops[::-1]]] = nodes.node_of[ops[::-1]]
    # Groups that share a node must become one, as a node is on one device.
    node = nodes.node_of[ops].astype(np.int64)
    part = joined(nodes.num_nodes, Ties(first[nodes.fine.group[ops]], node))
    group = np.full(nodes.num_nodes, -1, dtype=np.int32)
    group[node] = np.unique(part[node], return_inverse=True)[1]
    return group
