"""Columns of a graph that is written run by run: ops, tensors and what reads what.

Ops are those of a given graph, whole, again or in part, or others: copies, and what takes room and
nothing else. Ops that follow each other are written together. O(ops + reads), numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers
from hocket.graph.build import Interned, OpColumns, TensorColumns, assemble
from hocket.graph.graph import Graph, Role, Stream

_COPIES = {int(Stream.COPY_IN): "copy.in", int(Stream.COPY_OUT): "copy.out",
           int(Stream.COMPUTE): "room"}  # fmt: skip
"""Kinds of ops that are none of the given graph, by their streams."""


class WrittenOps(NamedTuple):
    """Ops that were written together; what they have in common with the given ones is added at the
    end."""

    origin: LongArray
    """Ops of the given graph; -1 for copies."""
    beside: LongArray
    """Ops of the given graph where they run."""
    num_parts: LongArray
    """In how many parts the given op is done; 0 for what takes room and nothing else."""
    is_again: BoolArray
    phase: LongArray
    stream: LongArray
    num_bytes: LongArray
    """That they read and write, or move."""
    partner: LongArray
    num_reads: LongArray
    reads: LongArray
    """One op after the other."""


class WrittenTensors(NamedTuple):
    """Tensors that were written together."""

    num_bytes: LongArray
    producer: LongArray
    role: LongArray
    alias_of: LongArray


class Columns:
    """The columns, and the graph that ops are given of."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.op_names: list[str] = []
        self.tensor_names: list[str] = []
        self.ops: list[WrittenOps] = []
        self._tensors: list[WrittenTensors] = []
        self._ends: dict[int, int] = {}
        """Ops to the control tensors that tell of their ends."""

    @property
    def num_ops(self) -> int:
        """Ops that were written so far."""
        return len(self.op_names)

    def add_op(
        self, name: str, reads: LongArray, beside: int, num_parts: int, phase: int, stream: int,
        num_bytes: int,
    ) -> int:  # fmt: skip
        """An op that is none of the given graph."""
        one = (-1, beside, num_parts, False, phase, stream, num_bytes, -1, len(reads))
        self.ops.append(WrittenOps(*[*(np.array([value]) for value in one), reads]))
        self.op_names.append(name)
        return self.num_ops - 1

    def add_tensors(
        self, names: list[str], num_bytes: LongArray, producer: LongArray, role: LongArray,
        alias_of: LongArray,
    ) -> LongArray:  # fmt: skip
        """Tensors, whose numbers are returned."""
        first = len(self.tensor_names)
        self.tensor_names += names
        self._tensors.append(WrittenTensors(num_bytes, producer, role, alias_of))
        return first + np.arange(len(names))

    def read_more(self, run: int, tensors: LongArray) -> None:
        """The last of some ops that were written together reads some tensors more."""
        columns = self.ops[run]
        columns.num_reads[-1] += len(tensors)
        self.ops[run] = columns._replace(reads=np.append(columns.reads, tensors))

    def told(self, op: int) -> int:
        """The control tensor that tells of the end of an op that was written."""
        if op not in self._ends:
            (self._ends[op],) = self.told_all(np.array([op]))
        return self._ends[op]

    def told_all(self, ops: LongArray) -> list[int]:
        """The same of several."""
        names = [f"{self.op_names[op]}@end" for op in ops.tolist()]
        nothing = np.zeros(len(ops), dtype=np.int64)
        told: list[int] = self.add_tensors(
            names, nothing, ops, nothing + int(Role.CONTROL), nothing - 1
        ).tolist()
        return told

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """The graph, and the columns of `Rewritten` beside it."""
        ops = WrittenOps(*map(np.concatenate, zip(*self.ops, strict=True)))
        tensors = WrittenTensors(*map(np.concatenate, zip(*self._tensors, strict=True)))
        is_copy = ops.origin < 0
        graph = assemble(
            name,
            self._op_columns(ops, is_copy),
            TensorColumns(self.tensor_names, *tensors),
            pointers(ops.num_reads),
            ops.reads,
            meta=self._graph.meta,
        )
        moved = np.where(is_copy, ops.num_bytes, 0)
        origin, beside = ops.origin.astype(np.int32), ops.beside.astype(np.int32)
        share = np.where(ops.num_parts > 0, 1.0 / np.maximum(ops.num_parts, 1), 0.0)
        return graph, origin, share, moved, beside

    def _op_columns(self, ops: WrittenOps, is_copy: BoolArray) -> OpColumns:
        given, source = self._graph, np.maximum(ops.origin, 0)
        count = np.maximum(ops.num_parts, 1)
        kinds = tuple(dict.fromkeys((*given.kinds, *_COPIES.values())))
        kind = given.op_kind[source].copy()
        for stream, name in _COPIES.items():
            kind[is_copy & (ops.stream == stream)] = kinds.index(name)
        signature = np.where(is_copy | (count > 1), -1, given.op_signature[source])
        return OpColumns(
            name=self.op_names,
            kind=Interned(kinds, kind),
            phase=ops.phase,
            dtype=np.where(is_copy, 0, given.op_dtype[source]),
            flops=np.where(is_copy, 0.0, given.flops[source] / count),
            bytes_touched=ops.num_bytes,
            workspace_bytes=np.where(is_copy, 0, -(-given.workspace_bytes[source] // count)),
            partner=ops.partner,
            group=np.where(is_copy, -1, given.group[source]),
            # What draws random numbers again, or in parts, draws the same ones.
            rng_order=np.where(is_copy | ops.is_again | (count > 1), -1, given.rng_order[source]),
            stream=ops.stream,
            module=Interned(given.modules, given.op_module[ops.beside]),
            signature=Interned(given.signatures, signature),
        )
