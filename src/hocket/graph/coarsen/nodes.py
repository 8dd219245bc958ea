"""Columns of the nodes of a coarse graph, aggregated from their ops.

A node has the name, kind, module and dtype of its heaviest op and the summed work of all its ops.
Its workspace is the maximum of the bytes that exist only inside it while its ops run one after
another. O(ops log ops) in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph, StatedTimes

_T = TypeVar("_T", np.float64, np.int64)


@dataclass(frozen=True, eq=False)
class Coarse:
    """A coarse graph, and the mapping from fine ops and tensors to it."""

    graph: Graph
    node_of: IntArray
    """Per fine op: its coarse op."""
    tensor_of: IntArray
    """Per fine tensor: the coarse tensor that contains it; -1 if it does not reach other nodes."""
    trips: IntArray
    """Per coarse tensor: how often its bytes cross a link to a reader on another device."""


def largest(values: NDArray[_T], tensor_of: IntArray, num_tensors: int) -> NDArray[_T]:
    """Per coarse tensor: largest of the values of its fine tensors."""
    found = np.zeros(num_tensors, dtype=values.dtype)
    inside = tensor_of >= 0
    np.maximum.at(found, tensor_of[inside], values[inside])
    return found


@dataclass(frozen=True, eq=False)
class Nodes:
    """A fine graph with the node of each op."""

    fine: Graph
    node_of: IntArray
    num_nodes: int

    @cached_property
    def order(self) -> LongArray:
        """Ops sorted by node, then by position."""
        return np.argsort(self.node_of, kind="stable")

    @cached_property
    def starts(self) -> LongArray:
        """Per node: index of its first op in ``order``; no node is empty."""
        return np.searchsorted(self.node_of[self.order], np.arange(self.num_nodes))

    @cached_property
    def reader(self) -> IntArray:
        """Per entry of ``fine.reads``: the node that reads."""
        return np.repeat(self.node_of, np.diff(self.fine.read_ptr))

    @cached_property
    def maker(self) -> IntArray:
        """Per fine tensor: the node that makes it; -1 if it exists before the step."""
        producer = self.fine.tensor_producer
        return np.where(producer >= 0, np.append(self.node_of, -1)[producer], -1)

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """Per node: sum of a value of its ops."""
        return np.add.reduceat(values[self.order], self.starts) if self.num_nodes else values[:0]

    def heaviest(self, op_s: FloatArray) -> IntArray:
        """Per node: its op that takes longest; the first if several do."""
        weight = np.where(np.isfinite(op_s), op_s, 0.0)
        order = np.lexsort((np.arange(len(op_s)), -weight, self.node_of))
        return order[self.starts].astype(np.int32)

    def first_with(self, mask: BoolArray) -> IntArray:
        """Per node: its first op that the mask marks; -1 if none."""
        first = np.full(self.num_nodes, -1, dtype=np.int32)
        marked = np.flatnonzero(mask)[::-1]
        first[self.node_of[marked]] = marked
        return first

    def live_bytes(self, is_inside: BoolArray) -> LongArray:
        """Per op: bytes that exist only inside its node while it runs, its workspace included.

        ``is_inside`` marks tensors whose storage exists only inside their node: from the op that
        makes it to its last reader there.
        """
        fine, num_ops = self.fine, self.fine.num_ops
        last = fine.tensor_producer.copy()
        within = self.reader == self.maker[fine.reads]
        np.maximum.at(last, fine.root_of[fine.reads[within]], fine.reader[within])
        owners = np.flatnonzero(is_inside & (fine.alias_of < 0) & (fine.tensor_producer >= 0))
        taken = np.zeros(num_ops + 1, dtype=np.int64)
        np.add.at(taken, fine.tensor_producer[owners], fine.tensor_bytes[owners])
        released = np.zeros(num_ops + 1, dtype=np.int64)
        np.add.at(released, last[owners], fine.tensor_bytes[owners])
        taken, released = taken[self.order], released[self.order]
        # Every node has released all that it allocated when it ends, so one running sum serves all.
        live = np.empty(num_ops, dtype=np.int64)
        # What ends with an op counts while it runs, hence its own releases are added back.
        live[self.order] = np.cumsum(taken) - np.cumsum(released) + released
        return live + fine.workspace_bytes

    def most(self, values: LongArray, mask: BoolArray) -> LongArray:
        """Per node: largest value among its ops that the mask marks; 0 if none."""
        if not self.num_nodes:
            return values[:0]
        return np.maximum.reduceat(np.where(mask, values, 0)[self.order], self.starts)

    def op_columns(self, op_s: FloatArray) -> dict[str, Any]:
        """Return the columns of the coarse graph that depend only on the ops."""
        fine, chief = self.fine, self.heaviest(op_s)
        # Only the signature of a single op describes the node's cost.
        is_single = np.diff(np.append(self.starts, fine.num_ops)) == 1
        drawn = np.full(self.num_nodes, np.iinfo(np.int32).max, dtype=np.int32)
        draws = np.flatnonzero(fine.rng_order >= 0)
        np.minimum.at(drawn, self.node_of[draws], fine.rng_order[draws])
        return {
            "name": fine.name,
            "op_names": tuple(fine.op_names[op] for op in chief.tolist()),
            "kinds": fine.kinds,
            "op_kind": fine.op_kind[chief],
            "modules": fine.modules,
            "op_module": fine.op_module[chief],
            "signatures": fine.signatures,
            "op_signature": np.where(is_single, fine.op_signature[chief], -1).astype(np.int32),
            "op_phase": fine.op_phase[chief],
            "op_dtype": fine.op_dtype[chief],
            "op_stream": fine.op_stream[chief],
            "flops": self.summed(fine.flops),
            "bytes_touched": self.summed(fine.bytes_touched),
            "rng_order": np.where(drawn < np.iinfo(np.int32).max, drawn, -1).astype(np.int32),
        }

    def stated(self, tensor_of: IntArray, num_tensors: int) -> StatedTimes | None:
        """Aggregate the stated times of the fine graph for nodes and coarse tensors."""
        stated = self.fine.stated
        if stated is None:
            return None
        op_s = {kind: self.summed(seconds) for kind, seconds in stated.op_s.items()}
        if stated.tensor_s is None:
            return StatedTimes(op_s)
        return StatedTimes(op_s, largest(stated.tensor_s, tensor_of, num_tensors))

    def meta(self) -> Mapping[str, Any]:
        """Return the origin of the coarse graph: name and size of the fine one."""
        return {"coarse_of": self.fine.name, "ops": self.fine.num_ops}
