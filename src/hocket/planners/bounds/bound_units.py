"""Units: ops that no legal plan separates, and the bytes that are stored with each unit.

O(ops + reads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Graph


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundUnits:
    """The units of a graph, numbered by their first ops."""

    of_op: IntArray
    """Per op: its unit."""
    count: int
    owner_op: IntArray
    """Per tensor: the op on whose device it is stored; -1 for tensors stored on device 0."""
    held_bytes: LongArray
    """Per unit: bytes that its device holds for it at the end of the step."""
    unread_bytes: int
    """Bytes of tensors that exist before the step and that no op reads; device 0 holds them."""


def find_units(graph: Graph) -> BoundUnits:
    """Return the units of a graph."""
    owner_op, of_op = graph.owner_op, bound_ops(graph)
    count = int(of_op.max(initial=-1)) + 1
    owned = np.flatnonzero(graph.is_held & (graph.alias_of < 0))
    is_read = owner_op[owned] >= 0
    held_bytes = np.zeros(count, dtype=np.int64)
    np.add.at(held_bytes, of_op[owner_op[owned[is_read]]], graph.tensor_bytes[owned[is_read]])
    unread_bytes = int(graph.tensor_bytes[owned[~is_read]].sum())
    return BoundUnits(
        of_op=of_op,
        count=count,
        owner_op=owner_op,
        held_bytes=held_bytes,
        unread_bytes=unread_bytes,
    )
