"""Forward-only graph: one node per unit, which represents the unit's whole training step.

A placement of the forward pass determines the rest, since backward and optimizer ops follow their
forward op. A node has the time of all its ops; its edges are those of the forward pass. The memory
of the rest of the step is represented by tensors of the coarse graph, which planners and simulator
count:

- parameters, buffers and optimizer state are read by the node;
- activations that later ops read are held to the end, both where they are made (role OUTPUT) and
  where they are copied to, by an alias (role OUTPUT) that the reading node makes of them;
- held gradients are made by the node; one that several nodes add to is passed along them in the
  order of the forward pass, the reverse of its real order;
- gradients that pass through a node, upstream ones and inner ones, are workspace.

The gradient of an activation crosses the same link back, so the activation counts as two trips.
O((ops + reads) log reads) in numpy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, positions
from hocket.graph.coarsen.contract import (
    Edges,
    contracted,
    in_order,
    joined_ends,
    quotient,
    strong_components,
)
from hocket.graph.coarsen.fuse import unit_groups
from hocket.graph.coarsen.nodes import Coarse, Nodes
from hocket.graph.coarsen.storages import StorageParts, legal_roles
from hocket.graph.graph import Graph, Phase, Role, distinct, read_table

# Which node of the forward pass each op of a training step belongs to.
#
# Forward ops of one unit are one node, unless units depend on each other in a cycle: those are
# split into parts without cycles. Later ops go with their partner, else with their unit; a unit
# without forward ops joins the unit from which it reads most bytes. O((ops + reads) log reads) in
# numpy.


def is_forward(graph: Graph) -> BoolArray:
    """Per op: True if it is placed: forward ops, or all ops if there are no forward ops."""
    forward: BoolArray = graph.op_phase == Phase.FORWARD
    return forward if forward.any() else np.ones_like(forward)


def forward_units(graph: Graph, unit_of: IntArray) -> IntArray:
    """Per op: its unit, after units without forward ops have joined another."""
    num_units = int(unit_of.max(initial=-1)) + 1
    has_forward = np.bincount(unit_of[is_forward(graph)], minlength=num_units) > 0
    if has_forward.all():
        return unit_of
    target = np.arange(num_units)
    reader, maker = _most_read(graph, unit_of, has_forward)
    target[reader] = maker
    # Targets may lack forward ops themselves; each round doubles the length of followed chains.
    for _ in range(num_units.bit_length()):
        target = target[target]
    # A unit that reads from no unit with forward ops goes to the first forward op.
    fallback = unit_of[int(np.argmax(is_forward(graph)))]
    return np.where(has_forward[target], target, fallback)[unit_of].astype(np.int32)


def follow(graph: Graph, unit_of: IntArray) -> Nodes:
    """Return nodes of forward ops in a topological order, with all later ops included.

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
    """Return units without forward ops, and for each the unit from which it reads most bytes.

    Units with forward ops are preferred.
    """
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
        # Numbers above those of units, so that split parts never equal an unsplit unit.
        part = np.where(in_circle, split + int(unit.max()) + 1, unit)
    _, dense = np.unique(part, return_inverse=True)
    return in_order(dense.astype(np.int64), edges)


def _in_circles(unit: LongArray, edges: Edges) -> BoolArray:
    """Per unit: True if it depends on itself through other units.

    A cycle of nodes would be a cycle of their units. So it is enough to split only these units,
    into parts without cycles among themselves.
    """
    circle = strong_components(quotient(unit, edges), int(unit.max(initial=-1)) + 1)
    return np.bincount(circle, minlength=1)[circle] > 1


def forward_only(graph: Graph, unit_of: IntArray, op_s: FloatArray) -> Coarse:
    """Return the graph with one node per unit of the forward pass, later ops included.

    ``op_s`` are seconds per op; they only decide which op gives a node its name. Units on a cycle
    are split into several nodes, tied by ``group``.
    """
    unit_of = forward_units(graph, unit_of)
    nodes, placed = follow(graph, unit_of), is_forward(graph)
    step = _StorageParts(nodes)
    # Ops of later phases get weight -1, so that a forward op gives the node its name.
    columns = nodes.op_columns(np.where(placed, op_s, -1.0))
    tensors = _tensors(step, columns["op_names"])
    live_bytes = nodes.live_bytes(~step.is_kept[step.parts.part_of])
    later_bytes = nodes.most(live_bytes, ~placed) + step.upstream_bytes
    coarse = Graph(
        **columns,
        workspace_bytes=np.maximum(nodes.most(live_bytes, placed), later_bytes),
        partner=np.full(nodes.num_nodes, -1, dtype=np.int32),
        group=unit_groups(nodes, unit_of),
        **tensors.columns,
        stated=nodes.stated(tensors.tensor_of, len(tensors.trips)),
        meta=nodes.meta(),
    )
    return Coarse(coarse, nodes.node_of, tensors.tensor_of, tensors.trips)


class _StorageParts:
    """Parts of storages and their reads: in the forward pass, in later phases, across nodes."""

    def __init__(self, nodes: Nodes) -> None:
        graph, self.nodes, self.parts = nodes.fine, nodes, StorageParts(nodes)
        placed, maker = is_forward(graph), self.parts.maker
        is_placed_made = np.append(placed, False)[graph.tensor_producer]
        self.is_forward = self.parts.any_of(is_placed_made)
        self.is_late = (maker >= 0) & ~self.is_forward
        self.is_held = self.parts.any_of(graph.is_held)
        self.part = self.parts.part_of[graph.reads]
        """Per entry of ``graph.reads``: the part that it reads."""
        self.by_late_op = ~np.repeat(placed, np.diff(graph.read_ptr))
        # A read is of the coarse graph only if it comes from an earlier node, or a cycle would
        # arise.
        between = self.parts.crossing & (maker[self.part] < nodes.reader)
        self.is_flow = between & ~self.is_late[self.part]
        """Per entry of ``graph.reads``: True if it is a read of the coarse graph.

        Such a read is of a tensor from before the step or from an earlier node.
        """
        self.is_saved = np.zeros(len(maker), dtype=np.bool_)
        """Per part: True if ops of later phases read it on the node that produces it."""
        self.is_saved[self.part[self.by_late_op & ~between & self.is_forward[self.part]]] = True
        is_read = np.zeros(len(maker), dtype=np.bool_)
        is_read[self.part[self.is_flow]] = True
        self.is_kept = (maker < 0) | self.is_held | (self.is_forward & (is_read | self.is_saved))
        self.base, self.num_bytes = self._bases()

    @property
    def upstream_bytes(self) -> LongArray:
        """Per node: bytes of gradients that it reads from other nodes and that are not kept."""
        passing = self.is_late[self.part] & self.parts.crossing & ~self.is_kept[self.part]
        node, part = self.pairs(passing)
        sums = np.zeros(self.nodes.num_nodes, dtype=np.int64)
        np.add.at(sums, node, self.parts.num_bytes()[part])
        return sums

    def pairs(self, entries: BoolArray) -> tuple[LongArray, LongArray]:
        """Return the distinct (reading node, part) pairs of the marked reads."""
        count = max(self.parts.num_parts, 1)
        key = distinct(self.nodes.reader[entries].astype(np.int64) * count + self.part[entries])
        return key // count, key % count

    def _bases(self) -> tuple[LongArray, LongArray]:
        """For each kept part: the part whose storage it shares (-1 if its own), and its bytes."""
        graph, parts = self.nodes.fine, self.parts
        base = parts.base(~self.is_late)
        late = np.flatnonzero(self.is_late & self.is_held)
        late = late[np.argsort(parts.root[late], kind="stable")]
        root = parts.root[late]
        is_next = np.append(False, root[1:] == root[:-1])
        # Held gradients of one storage form a chain: each aliases the next in forward order.
        base[late] = np.where(is_next, np.append(-1, late)[: len(late)], base[late])
        is_update = graph.tensor_producer[root] < 0
        base[late[is_update]] = parts.part_of[root[is_update]]
        own_bytes = graph.tensor_bytes[parts.root]
        return base, np.where(base < 0, own_bytes, parts.num_bytes())


class _Tensors(NamedTuple):
    columns: dict[str, Any]
    tensor_of: IntArray
    trips: IntArray


def _tensors(step: _StorageParts, node_names: tuple[str, ...]) -> _Tensors:
    graph, parts = step.nodes.fine, step.parts
    kept = np.flatnonzero(step.is_kept)
    copier, copied = _copies(step)
    producer = np.concatenate((parts.maker[kept], copier))
    order = np.argsort(producer, kind="stable")
    rank = positions(order)
    number = np.full(parts.num_parts + 1, -1, dtype=np.int64)
    number[kept] = rank[: len(kept)]
    chief = parts.chief()[kept]
    names = [graph.tensor_names[tensor] for tensor in chief.tolist()]
    names += [
        f"{graph.tensor_names[tensor]} kept by {node_names[node]}"
        for node, tensor in zip(copier.tolist(), parts.first[copied].tolist(), strict=True)
    ]
    role = np.concatenate((_roles(step, kept, chief), np.full(len(copied), Role.OUTPUT, np.int8)))
    base = np.concatenate((step.base[kept], copied))
    links = np.flatnonzero(step.is_late & step.is_kept & (step.base >= 0))
    read_ptr, reads = read_table(
        np.concatenate((step.nodes.reader[step.is_flow], parts.maker[links])),
        number[np.concatenate((step.part[step.is_flow], step.base[links]))],
        step.nodes.num_nodes,
        len(order),
    )
    # A gradient flows back over the same link only if the maker reads gradients from other nodes.
    returns = step.is_forward[kept] & (step.upstream_bytes[parts.maker[kept]] > 0)
    columns = {
        "tensor_names": tuple(names[index] for index in order.tolist()),
        "tensor_bytes": step.num_bytes[np.concatenate((kept, copied))][order],
        "tensor_role": role[order],
        "tensor_producer": producer[order].astype(np.int32),
        "alias_of": number[base][order].astype(np.int32),
        "read_ptr": read_ptr,
        "reads": reads,
    }
    trips = np.concatenate((1 + returns, np.ones(len(copied))))[order].astype(np.int32)
    return _Tensors(columns, parts.sent_as(number), trips)


def _copies(step: _StorageParts) -> tuple[LongArray, LongArray]:
    """Return (node, part) pairs: parts of other nodes that later ops of the node read again.

    The node that owns a parameter needs no copy of it, and no node needs one of the batch.
    """
    graph, parts = step.nodes.fine, step.parts
    node, part = step.pairs(step.is_flow & step.by_late_op)
    root = graph.root_of[parts.first]
    owner = np.full(graph.num_tensors, step.nodes.num_nodes)
    early = step.is_flow & (parts.maker[step.part] < 0)
    np.minimum.at(owner, root[step.part[early]], step.nodes.reader[early])
    is_before = parts.maker[part] < 0
    is_batch = is_before & (graph.tensor_role[parts.first[part]] == Role.INPUT)
    is_owned = is_before & (owner[root[part]] == node)
    chosen = ~is_batch & ~is_owned & (step.num_bytes[part] > 0)
    return node[chosen], part[chosen]


def _roles(step: _StorageParts, kept: LongArray, chief: IntArray) -> NDArray[np.int8]:
    role = step.nodes.fine.tensor_role[chief]
    is_made = step.parts.maker[kept] >= 0
    role = legal_roles(role, is_made, step.base[kept], step.num_bytes[kept])
    is_short = (role == Role.ACTIVATION) | (role == Role.CONTROL)
    return np.where(is_short & step.is_saved[kept], Role.OUTPUT, role).astype(np.int8)
