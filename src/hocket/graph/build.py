"""Build a Graph: from columns at once (`assemble`) or op by op (`GraphBuilder`).

Both end in `assemble`, which sorts ops topologically, sorts tensors by their producers, and calls
`verify_graph`. Ops that are already in a topological order stay in it; others are sorted by Kahn's
algorithm, smallest original position first. O(ops log ops + reads).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from hocket.base.arrays import IntArray, pointers, positions
from hocket.base.errors import InputFileError
from hocket.graph.columns import OP_COLUMNS, TENSOR_COLUMNS, Column
from hocket.graph.graph import DTYPES, Graph, Phase, Role, StatedTimes, Stream, read_table
from hocket.graph.topological_order import topological_order
from hocket.graph.verify import require_read_table, verify_graph


class Interned(NamedTuple):
    """A column of strings: the distinct strings, and per op its index into them, -1 for none."""

    table: Sequence[str]
    numbers: IntArray


@dataclass
class OpColumns:
    """Per-op columns; an empty column has the default for every op."""

    name: Sequence[str]
    kind: Sequence[str] | Interned
    phase: Any = ()
    dtype: Any = ()
    flops: Any = ()
    bytes_touched: Any = ()
    workspace_bytes: Any = ()
    partner: Any = ()
    group: Any = ()
    rng_order: Any = ()
    stream: Any = ()
    module: Sequence[str] | Interned = ()
    signature: Sequence[str] | Interned = ()


@dataclass
class TensorColumns:
    """Per-tensor columns; an empty column has the default for every tensor."""

    name: Sequence[str]
    bytes: Any
    producer: Any
    role: Any = ()
    alias_of: Any = ()


def assemble(
    name: str,
    ops: OpColumns,
    tensors: TensorColumns,
    read_ptr: Any,
    reads: Any,
    *,
    stated: StatedTimes | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Graph:
    """Build and verify a Graph from columns, sorting ops and tensors where needed."""
    num_ops, num_tensors = len(ops.name), len(tensors.name)
    producer = np.asarray(tensors.producer, dtype=np.int32)
    read_ptr = np.asarray(read_ptr, dtype=np.int64)
    reads = np.asarray(reads, dtype=np.int32)
    # Before sorting, since bad indices would raise errors that name no op.
    _require_indices(ops, tensors, producer, read_ptr, reads)
    op_order = topological_order(ops.name, producer, read_ptr, reads)
    op_rank = positions(op_order).astype(np.int32)
    new_producer = _renumbered(producer, op_rank)
    # Stable, so that tensors of one op stay in the order in which the caller listed them.
    tensor_order = np.argsort(new_producer, kind="stable").astype(np.int32)
    tensor_rank = positions(tensor_order).astype(np.int32)
    reader = np.repeat(op_rank, np.diff(read_ptr))
    new_ptr, new_reads = read_table(reader, tensor_rank[reads], num_ops, num_tensors)

    kinds, kind = _interned(ops.kind, op_order)
    modules, module = _interned(ops.module, op_order)
    signatures, signature = _interned(ops.signature, op_order)
    texts: dict[str, Any] = {"op_kind": kind, "op_module": module, "op_signature": signature}
    op_columns: dict[str, Any] = {
        column.field: _column(getattr(ops, column.key), num_ops, column)[op_order]
        for column in OP_COLUMNS
        if column.field not in texts
    }
    tensor_columns: dict[str, Any] = {
        column.field: _column(getattr(tensors, column.key), num_tensors, column)[tensor_order]
        for column in TENSOR_COLUMNS
    }
    graph = Graph(
        name=name,
        op_names=tuple(_taken(ops.name, op_order)),
        kinds=kinds,
        modules=modules,
        signatures=signatures,
        **texts,
        **op_columns | {"partner": _renumbered(op_columns["partner"], op_rank)},
        tensor_names=tuple(_taken(tensors.name, tensor_order)),
        **tensor_columns
        | {
            "tensor_producer": new_producer[tensor_order].astype(np.int32),
            "alias_of": _renumbered(tensor_columns["alias_of"], tensor_rank),
        },
        read_ptr=new_ptr,
        reads=new_reads,
        stated=_reordered(stated, op_order, tensor_order),
        meta=dict(meta or {}),
    )
    verify_graph(graph)
    return graph


class OpFields(TypedDict, total=False):
    """Optional columns of an op that `GraphBuilder` adds."""

    phase: Phase
    flops: float
    bytes_touched: int
    workspace_bytes: int
    partner: int
    group: int
    rng_order: int
    stream: Stream
    module: str
    signature: str


@dataclass
class GraphBuilder:
    """Collects ops and tensors one at a time, for readers of files, captures and tests."""

    name: str
    ops: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    op_reads: list[list[int]] = field(default_factory=list)

    def tensor(
        self,
        name: str,
        size_bytes: int,
        *,
        producer: int = -1,
        role: Role = Role.ACTIVATION,
        alias_of: int = -1,
    ) -> int:
        """Add a tensor and return its number."""
        columns = {"bytes": size_bytes, "producer": producer, "role": role, "alias_of": alias_of}
        self.tensors.append({"name": name, **columns})
        return len(self.tensors) - 1

    def op(
        self,
        name: str,
        kind: str = "op",
        *,
        reads: Iterable[int] = (),
        dtype: str = "float32",
        **columns: Unpack[OpFields],
    ) -> int:
        """Add an op that reads the given tensors and return its number."""
        self.ops.append({"name": name, "kind": kind, "dtype": DTYPES.index(dtype), **columns})
        self.op_reads.append(list(reads))
        return len(self.ops) - 1

    def read(self, op: int, tensor: int) -> None:
        """Add a tensor to the inputs of an op."""
        self.op_reads[op].append(tensor)

    def build(
        self, *, stated: StatedTimes | None = None, meta: Mapping[str, Any] | None = None
    ) -> Graph:
        """Return the finished, verified graph."""
        default: dict[str, Any] = {column.key: column.default for column in OP_COLUMNS}
        default |= {"module": "", "signature": ""}
        ops: dict[str, Any] = {
            key: [op.get(key, default.get(key)) for op in self.ops]
            for key in OpColumns.__dataclass_fields__
        }
        tensors: dict[str, Any] = {
            key: [tensor[key] for tensor in self.tensors]
            for key in TensorColumns.__dataclass_fields__
        }
        lengths = [len(reads) for reads in self.op_reads]
        read_ptr = pointers(lengths)
        flat = [tensor for reads in self.op_reads for tensor in reads]
        return assemble(
            self.name, OpColumns(**ops), TensorColumns(**tensors), read_ptr, flat,
            stated=stated, meta=meta,
        )  # fmt: skip


def _require_indices(
    ops: OpColumns, tensors: TensorColumns, producer: IntArray, read_ptr: Any, reads: IntArray
) -> None:
    """Raise on indices out of range, before anything is sorted by them."""
    num_ops, num_tensors = len(ops.name), len(tensors.name)
    require_read_table(ops.name, read_ptr, reads)
    for what, values, count, low in (
        ("producer of a tensor", producer, num_ops, -1),
        ("tensor read by an op", reads, num_tensors, 0),
        ("partner of an op", np.asarray(ops.partner, dtype=np.int64), num_ops, -1),
        ("alias of a tensor", np.asarray(tensors.alias_of, dtype=np.int64), num_tensors, -1),
    ):
        wrong = np.flatnonzero((values < low) | (values >= count))
        if len(wrong):
            raise InputFileError(
                f"{what} is {int(values[wrong[0]])}, which does not exist (there are {count})",
                hint="ids must point at ops and tensors of the same graph",
            )


def _taken(texts: Sequence[str], order: IntArray) -> list[str]:
    """Return the strings in a new order; none if the column is empty."""
    return [texts[i] for i in order.tolist()] if len(texts) else []


def _column(values: Any, count: int, column: Column) -> Any:
    if len(values) == 0:
        return np.full(count, column.default or 0, dtype=column.dtype)
    if len(values) != count:
        raise InputFileError(
            f"column {column.key!r} has {len(values)} entries, expected {count}",
            hint="every column has one entry per op or per tensor, or none at all",
        )
    return np.asarray(values, dtype=column.dtype)


def _renumbered(links: IntArray, rank: IntArray) -> IntArray:
    """Return indices in the new numbering; -1 stays -1."""
    # The appended -1 is what the index -1 selects.
    return np.append(rank, -1)[links].astype(np.int32)


def _interned(
    values: Sequence[str] | Interned, order: IntArray
) -> tuple[tuple[str, ...], IntArray]:
    """Distinct strings in order of first appearance, and the index of each; '' becomes -1."""
    if not values:
        return (), np.full(len(order), -1, dtype=np.int32)
    if isinstance(values, Interned):
        used, first, index = np.unique(
            values.numbers[order], return_index=True, return_inverse=True
        )
        # -1 stands for no text and must not become an entry of the table.
        is_text = used >= 0
        by_appearance = np.argsort(first[is_text], kind="stable")
        rank = np.full(len(used), -1)
        rank[is_text] = positions(by_appearance)
        texts = tuple(values.table[number] for number in used[is_text][by_appearance].tolist())
        return texts, rank[index].astype(np.int32)
    table: dict[str, int] = {}
    numbers = [table.setdefault(value, len(table)) if value else -1
               for value in _taken(values, order)]  # fmt: skip
    return tuple(table), np.array(numbers, dtype=np.int32)


def _reordered(
    stated: StatedTimes | None, op_order: IntArray, tensor_order: IntArray
) -> StatedTimes | None:
    if stated is None:
        return None
    by_kind = {kind: np.asarray(s, dtype=np.float64)[op_order] for kind, s in stated.op_s.items()}
    tensor_s = None if stated.tensor_s is None else np.asarray(stated.tensor_s)[tensor_order]
    return StatedTimes(by_kind, tensor_s)
