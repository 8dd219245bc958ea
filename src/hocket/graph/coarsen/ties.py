"""Ties: pairs of ops that belong on one device, and why.

Hard ties are what a legal plan must keep; all others are advice. O(reads log reads) in numpy.
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
    """Ops of one group; ops that update a tensor from before the step with its first reader.

    The first reader is where the tensor lives.
    """
    grouped = np.flatnonzero(graph.group >= 0).astype(np.int32)
    _, first, inverse = np.unique(graph.group[grouped], return_index=True, return_inverse=True)
    yield Ties(grouped, grouped[first][inverse])
    before, root = graph.tensor_producer < 0, graph.root_of
    is_update = np.isin(graph.tensor_role, PERSISTENT_ROLES) & ~before & before[root]
    updates = np.flatnonzero(is_update)
    yield Ties(graph.tensor_producer[updates], graph.owner_op[root[updates]])


def partners(graph: Graph) -> Ties:
    """Backward ops, each with its forward op."""
    paired = np.flatnonzero(graph.partner >= 0).astype(np.int32)
    return Ties(paired, graph.partner[paired])


def views(graph: Graph) -> Ties:
    """Ops that do no work, each with the maker of what it views, else with its first reader.

    The latter are views of parameters and bare allocations: alone they would be placed as soon as
    they are ready, which is before everything else and far from where they are used.
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
    """Ops that work in place on what the step has made, each with the op before them there."""
    made = np.flatnonzero((graph.tensor_producer >= 0) & (graph.alias_of >= 0))
    base_maker = graph.tensor_producer[graph.alias_of[made]]
    known = base_maker >= 0
    return Ties(graph.tensor_producer[made[known]], base_maker[known])


def of_forward_ops(graph: Graph, ties: Ties) -> Ties:
    """Those of the ties whose first op belongs to the forward pass."""
    chosen = graph.op_phase[ties.first] == Phase.FORWARD
    return Ties(ties.first[chosen], ties.second[chosen])


def isolated(graph: Graph) -> Ties:
    """Ops that exchange nothing with others, each with the next op that does (counters)."""
    is_with_others = is_linked(graph)
    linked, alone = np.flatnonzero(is_with_others), np.flatnonzero(~is_with_others)
    if not len(linked):
        return Ties(alone[:0], alone[:0])
    following = np.minimum(np.searchsorted(linked, alone), len(linked) - 1)
    return Ties(alone, linked[following])


def is_linked(graph: Graph) -> BoolArray:
    """True for ops that read what another produces or produce what another reads."""
    src, dst = graph.edges
    linked = np.zeros(graph.num_ops, dtype=np.bool_)
    linked[src] = linked[dst] = True
    return linked


def optimizers(graph: Graph) -> Ties:
    """Optimizer ops, each with the first op that reads the largest parameter that it reads."""
    reader = np.repeat(np.arange(graph.num_ops, dtype=np.int32), np.diff(graph.read_ptr))
    root = graph.root_of[graph.reads]
    first = graph.owner_op[root]
    is_parameter = (graph.tensor_role[graph.reads] == Role.PARAMETER) & (
        graph.tensor_producer[root] < 0
    )
    decides = (graph.op_phase[reader] == Phase.OPTIMIZER) & is_parameter & (first < reader)
    return _largest(graph, np.flatnonzero(decides), reader, first)


def followers(graph: Graph) -> Ties:
    """Later ops without partner, each with the maker of the largest tensor that it reads.

    Tensors of the forward pass come first: followers of followers would become one unit.
    """
    reader = np.repeat(np.arange(graph.num_ops, dtype=np.int32), np.diff(graph.read_ptr))
    maker = graph.tensor_producer[graph.reads]
    loose = (graph.op_phase != Phase.FORWARD) & (graph.partner < 0) & (graph.group < 0)
    deciding = np.flatnonzero(loose[reader] & (maker >= 0))
    return _largest(graph, deciding, reader, maker)


def _largest(graph: Graph, entries: LongArray, reader: IntArray, target: IntArray) -> Ties:
    """Of the given entries of ``graph.reads``, for each reader the tie of the largest tensor."""
    is_late = graph.op_phase[target[entries]] != Phase.FORWARD
    size = graph.tensor_bytes[graph.reads[entries]]
    order = entries[np.lexsort((entries, -size, is_late, reader[entries]))]
    ops, first = np.unique(reader[order], return_index=True)
    return Ties(ops, target[order[first]])
