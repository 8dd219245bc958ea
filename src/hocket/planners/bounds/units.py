"""Units: ops that no legal plan separates, and the bytes that go wherever a unit goes.

Ops of one group share a device, and an op that updates a persistent tensor in place runs where that
tensor lives, which is where the first op runs that reads it. Connected components of the two.
O(ops + reads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.arrays import ByteArray, IntArray
from hocket.graph.graph import PERSISTENT_ROLES, Graph
from hocket.simulate.places import home_devices


@dataclass(frozen=True, eq=False, kw_only=True)
class Units:
    """The units of a graph, numbered by their first ops."""

    of_op: IntArray
    """The unit of each op."""
    count: int
    home_op: IntArray
    """Per tensor: the op on whose device it is at home; -1 for those at home on device 0."""
    held_bytes: ByteArray
    """Per unit: bytes that its device holds, all of them, at the end of the step."""
    unread_bytes: int
    """Bytes that device 0 holds throughout: of tensors that exist before the step, read by none."""


def find_units(graph: Graph) -> Units:
    """The units of a graph."""
    home_op = _home_ops(graph)
    of_op = _components(graph, home_op)
    count = int(of_op.max(initial=-1)) + 1
    owned = np.flatnonzero(graph.is_held & (graph.alias_of < 0))
    is_read = home_op[owned] >= 0
    held_bytes = np.zeros(count, dtype=np.int64)
    np.add.at(held_bytes, of_op[home_op[owned[is_read]]], graph.tensor_bytes[owned[is_read]])
    unread_bytes = int(graph.tensor_bytes[owned[~is_read]].sum())
    return Units(
        of_op=of_op,
        count=count,
        home_op=home_op,
        held_bytes=held_bytes,
        unread_bytes=unread_bytes,
    )


def _home_ops(graph: Graph) -> IntArray:
    """As `home_devices`, with ops in the place of devices."""
    home = home_devices(graph, np.arange(graph.num_ops, dtype=np.int32))
    before = graph.tensor_producer < 0
    # Only reads of tensors that exist before the step decide where their storage is.
    is_read = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_read[graph.root_of[graph.reads[before[graph.reads]]]] = True
    home[before & ~is_read[graph.root_of]] = -1
    return home


def _ties(graph: Graph, home_op: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs of ops that share a device, enough of them to join every unit."""
    grouped = np.flatnonzero(graph.group >= 0)
    _, first, inverse = np.unique(graph.group[grouped], return_index=True, return_inverse=True)
    root = graph.root_of
    is_update = (
        np.isin(graph.tensor_role, PERSISTENT_ROLES)
        & (graph.tensor_producer >= 0)
        & (graph.tensor_producer[root] < 0)
        & (home_op[root] >= 0)
    )
    updates = np.flatnonzero(is_update)
    row = np.concatenate((grouped, graph.tensor_producer[updates]))
    column = np.concatenate((grouped[first][inverse], home_op[root[updates]]))
    return row.astype(np.int32), column.astype(np.int32)


def _components(graph: Graph, home_op: IntArray) -> IntArray:
    row, column = _ties(graph, home_op)
    if not len(row):
        return np.arange(graph.num_ops, dtype=np.int32)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = (graph.num_ops, graph.num_ops)
    ties = coo_array((np.ones(len(row), dtype=np.bool_), (row, column)), size)
    _, label = connected_components(ties, directed=False)
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    of_op: IntArray = rank[inverse].astype(np.int32)
    return of_op
