"""Ties: pairs of ops that should share a device, by reason.

A legal plan must keep hard ties; all others are recommendations. O(reads log reads) in numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role


class Ties(NamedTuple):
    """Pairs of ops, the most useful first."""

    first: NDArray[np.integer[Any]]
    second: NDArray[np.integer[Any]]


def hard_ties(graph: Graph) -> Iterator[Ties]:
    """Yield ties of the ops of one group, and of in-place updates of tensors from before the step.

    An update is tied to the tensor's first reader, on whose device the tensor is stored.
    """
    grouped = np.flatnonzero(graph.group >= 0).astype(np.int32)
    _, first, inverse = np.unique(graph.group[grouped], return_index=True, return_inverse=True)
    yield Ties(grouped, grouped[first][inverse])
    before, root = graph.tensor_producer < 0, graph.root_of
    is_update = np.isin(graph.tensor_role, PERSISTENT_ROLES) & ~before & before[root]
    # A new version of a persistent tensor whose storage exists before the step.
    updates = np.flatnonzero(is_update)
    yield Ties(graph.tensor_producer[updates], graph.owner_op[root[updates]])


def partners(graph: Graph) -> Ties:
    """Tie each backward op to its forward op."""
    paired = np.flatnonzero(graph.partner >= 0).astype(np.int32)
    return Ties(paired, graph.partner[paired])


def views(graph: Graph) -> Ties:
    """Tie each op that does no work to the producer of the tensor it views, else its first reader.

    The latter are views of parameters and bare allocations: untied, they would be placed as soon as
    they are ready, which is before everything else and far from their readers.
    """
    made = np.flatnonzero(graph.tensor_producer >= 0)
    made = made[~graph.works[graph.tensor_producer[made]]]
    viewed_maker = np.where(
        graph.alias_of[made] >= 0, graph.tensor_producer[graph.alias_of[made]], -1
    )
    is_read = np.diff(graph.user_ptr)[made] > 0
    readers = np.append(graph.users, -1)[np.where(is_read, graph.user_ptr[made], -1)]
    partner = np.where(viewed_maker >= 0, viewed_maker, readers)
    known = np.flatnonzero(partner >= 0)
    # Tensors are in the order of their producers: the first one found counts.
    viewer, first = np.unique(graph.tensor_producer[made[known]], return_index=True)
    return Ties(viewer, partner[known[first]])


def in_place(graph: Graph) -> Ties:
    """Tie each op that updates a result of the step in place to the previous op on that storage."""
    made = np.flatnonzero((graph.tensor_producer >= 0) & (graph.alias_of >= 0))
    base_maker = graph.tensor_producer[graph.alias_of[made]]
    known = base_maker >= 0
    return Ties(graph.tensor_producer[made[known]], base_maker[known])


def of_forward_ops(graph: Graph, ties: Ties) -> Ties:
    """Return the ties whose first op belongs to the forward pass."""
    chosen = graph.op_phase[ties.first] == Phase.FORWARD
    return Ties(ties.first[chosen], ties.second[chosen])


def isolated(graph: Graph) -> Ties:
    """Tie each op without edges (counters) to the next op that has some."""
    is_with_others = is_linked(graph)
    linked, alone = np.flatnonzero(is_with_others), np.flatnonzero(~is_with_others)
    if not len(linked):
        return Ties(alone[:0], alone[:0])
    following = np.minimum(np.searchsorted(linked, alone), len(linked) - 1)
    return Ties(alone, linked[following])


def is_linked(graph: Graph) -> BoolArray:
    """Per op: True if it has an edge to another op."""
    src, dst = graph.edges
    linked = np.zeros(graph.num_ops, dtype=np.bool_)
    linked[src] = linked[dst] = True
    return linked


def optimizers(graph: Graph) -> Ties:
    """Tie each optimizer op to the first reader of its largest parameter."""
    root = graph.root_of[graph.reads]
    first = graph.owner_op[root]
    is_parameter = (graph.tensor_role[graph.reads] == Role.PARAMETER) & (
        graph.tensor_producer[root] < 0
    )
    decides = (graph.op_phase[graph.reader] == Phase.OPTIMIZER) & is_parameter
    # An optimizer op that is the first reader itself would be tied to itself.
    decides &= first < graph.reader
    return _largest(graph, np.flatnonzero(decides), first)


def followers(graph: Graph) -> Ties:
    """Tie each later op without partner to the producer of its largest input.

    Inputs from the forward pass are preferred: otherwise followers of followers would become one
    unit.
    """
    maker = graph.tensor_producer[graph.reads]
    loose = (graph.op_phase != Phase.FORWARD) & (graph.partner < 0) & (graph.group < 0)
    return _largest(graph, np.flatnonzero(loose[graph.reader] & (maker >= 0)), maker)


def _largest(graph: Graph, entries: LongArray, target: IntArray) -> Ties:
    """Tie each reader to the target of its largest tensor among the given entries of ``reads``."""
    reader = graph.reader
    is_late = graph.op_phase[target[entries]] != Phase.FORWARD
    size = graph.tensor_bytes[graph.reads[entries]]
    order = entries[np.lexsort((entries, -size, is_late, reader[entries]))]
    ops, first = np.unique(reader[order], return_index=True)
    return Ties(ops, target[order[first]])
