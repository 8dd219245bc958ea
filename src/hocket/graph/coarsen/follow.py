"""Which node of the forward pass each op of a training step belongs to.

Forward ops of one unit are one node, unless units depend on each other in a circle: those are
split into parts that do not. Later ops go with their partner, else with their unit; a unit without
forward ops joins the unit that it reads most bytes from. O((ops + reads) log reads) in numpy.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.graph.coarsen.contract import Edges, contracted, in_order, joined_ends, quotient
from hocket.graph.coarsen.nodes import Nodes
from hocket.graph.graph import Graph, Phase


def is_forward(graph: Graph) -> BoolArray:
    """Which ops are placed: those of the forward pass, or all where there is none."""
    forward: BoolArray = graph.op_phase == Phase.FORWARD
    return forward if forward.any() else np.ones_like(forward)


def forward_units(graph: Graph, unit_of: IntArray) -> IntArray:
    """The units, where those without forward ops have joined another."""
    num_units = int(unit_of.max(initial=-1)) + 1
    has_forward = np.bincount(unit_of[is_forward(graph)], minlength=num_units) > 0
    if has_forward.all():
        return unit_of
    target = np.arange(num_units)
    reader, maker = _most_read(graph, unit_of, has_forward)
    target[reader] = maker
    for _ in range(num_units.bit_length()):
        target = target[target]
    fallback = unit_of[int(np.argmax(is_forward(graph)))]
    return np.where(has_forward[target], target, fallback)[unit_of].astype(np.int32)


def follow(graph: Graph, unit_of: IntArray) -> Nodes:
    """Nodes of forward ops, in a topological order, with all later ops in them.

    Every unit must have a forward op.
    """
    forward = np.flatnonzero(is_forward(graph))
    node_of = np.full(graph.num_ops, -1, dtype=np.int32)
    node_of[forward] = _forward_nodes(graph, unit_of, forward)
    first = np.zeros(int(unit_of.max(initial=-1)) + 1, dtype=np.int64)
    first[unit_of[forward[::-1]]] = forward[::-1]
    later = np.flatnonzero(node_of < 0)
    partner = graph.partner[later]
    keeps_partner = (partner >= 0) & (unit_of[partner] == unit_of[later])
    node_of[later] = node_of[np.where(keeps_partner, partner, first[unit_of[later]])]
    return Nodes(graph, node_of, int(node_of.max(initial=-1)) + 1)


def _most_read(
    graph: Graph, unit_of: IntArray, has_forward: BoolArray
) -> tuple[LongArray, LongArray]:
    """Units without forward ops, and the unit that each reads most from, best one with some."""
    num_units = len(has_forward)
    reader = np.repeat(unit_of, np.diff(graph.read_ptr)).astype(np.int64)
    maker = np.append(unit_of, -1)[graph.tensor_producer[graph.reads]].astype(np.int64)
    loose = (maker >= 0) & (maker != reader) & ~has_forward[reader]
    key, inverse = np.unique(reader[loose] * num_units + maker[loose], return_inverse=True)
    read_bytes = np.bincount(inverse, graph.tensor_bytes[graph.reads[loose]], minlength=len(key))
    reader, maker = key // num_units, key % num_units
    order = np.lexsort((maker, -read_bytes, ~has_forward[maker], reader))
    units, first = np.unique(reader[order], return_index=True)
    return units, maker[order[first]]


def _forward_nodes(graph: Graph, unit_of: IntArray, forward: LongArray) -> LongArray:
    rank = np.full(graph.num_ops, -1, dtype=np.int64)
    rank[forward] = np.arange(len(forward))
    src, dst = (rank[ends] for ends in graph.edges)
    inner = (src >= 0) & (dst >= 0)
    edges = Edges(src[inner], dst[inner])
    unit = unit_of[forward].astype(np.int64)
    in_circle = _in_circles(unit, edges)[unit]
    part = unit
    if in_circle.any():
        never = np.zeros(len(forward), dtype=np.bool_)
        split = contracted(joined_ends(edges, unit, never), edges, unit)
        part = np.where(in_circle, split + int(unit.max()) + 1, unit)
    _, dense = np.unique(part, return_inverse=True)
    return in_order(dense.astype(np.int64), edges)


def _in_circles(unit: LongArray, edges: Edges) -> BoolArray:
    """Whether each unit depends on itself through others.

    A circle of nodes would be a circle of their units; so where only these units are split, into
    parts that make no circle among themselves, none is left.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = int(unit.max(initial=-1)) + 1
    between = quotient(unit, edges)
    matrix = coo_array((np.ones(len(between.src), dtype=bool), between), (count, count))
    _, circle = connected_components(matrix, directed=True, connection="strong")
    return np.asarray(np.bincount(circle, minlength=1)[circle] > 1)
