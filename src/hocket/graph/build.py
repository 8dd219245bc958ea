"""Build a Graph: from columns at once (`assemble`) or op by op (`GraphBuilder`).

Both end in `assemble`, which sorts ops topologically, sorts tensors by their producers, and calls
`verify_graph`. Ops that already are in a topological order keep it; others are sorted by Kahn's
algorithm, smallest given position first. O(ops log ops + reads).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, pointers, positions
from hocket.base.errors import InputFileError
from hocket.graph.graph import DTYPES, Graph, Phase, Role, StatedTimes, Stream, distinct
from hocket.graph.verify import verify_graph


class Interned(NamedTuple):
    """A column of strings as numbers: the distinct strings, and per op its index, -1 for none."""

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
    producer = _column(tensors.producer, num_tensors, -1, np.int32)
    read_ptr = np.asarray(read_ptr, dtype=np.int64)
    reads = np.asarray(reads, dtype=np.int32)
    _require_indices(ops, tensors, producer, read_ptr, reads)
    op_order = topological_order(ops.name, producer, read_ptr, reads)
    op_rank = positions(op_order).astype(np.int32)
    new_producer = np.where(producer >= 0, op_rank[producer], -1) if num_ops else producer
    tensor_order = np.argsort(new_producer, kind="stable").astype(np.int32)
    tensor_rank = positions(tensor_order).astype(np.int32)
    new_ptr, new_reads = _sorted_reads(op_order, tensor_rank, read_ptr, reads)

    def op_column(values: Any, default: float, dtype: Any) -> Any:
        return _column(values, num_ops, default, dtype)[op_order]

    def op_links(values: Any) -> IntArray:
        links = op_column(values, -1, np.int32)
        return np.where(links >= 0, op_rank[links], -1).astype(np.int32) if num_ops else links

    kinds, kind = _interned(ops.kind, op_order)
    modules, module = _interned(ops.module, op_order)
    signatures, signature = _interned(ops.signature, op_order)
    none = np.full(num_ops, -1, dtype=np.int32)
    alias = _column(tensors.alias_of, num_tensors, -1, np.int32)[tensor_order]
    graph = Graph(
        name=name,
        op_names=tuple(_taken(ops.name, op_order)),
        kinds=kinds,
        op_kind=kind,
        modules=modules,
        op_module=module if ops.module else none,
        signatures=signatures,
        op_signature=signature if ops.signature else none.copy(),
        op_phase=op_column(ops.phase, Phase.FORWARD, np.int8),
        op_dtype=op_column(ops.dtype, 0, np.int8),
        flops=op_column(ops.flops, 0.0, np.float64),
        bytes_touched=op_column(ops.bytes_touched, 0, np.int64),
        workspace_bytes=op_column(ops.workspace_bytes, 0, np.int64),
        partner=op_links(ops.partner),
        group=op_column(ops.group, -1, np.int32),
        rng_order=op_column(ops.rng_order, -1, np.int32),
        op_stream=op_column(ops.stream, Stream.COMPUTE, np.int8),
        tensor_names=tuple(_taken(tensors.name, tensor_order)),
        tensor_bytes=_column(tensors.bytes, num_tensors, 0, np.int64)[tensor_order],
        tensor_role=_column(tensors.role, num_tensors, Role.ACTIVATION, np.int8)[tensor_order],
        tensor_producer=new_producer[tensor_order].astype(np.int32),
        alias_of=np.where(alias >= 0, tensor_rank[alias], -1).astype(np.int32)
        if num_tensors
        else alias,
        read_ptr=new_ptr,
        reads=new_reads,
        stated=_reordered(stated, op_order, tensor_order),
        meta=dict(meta or {}),
    )
    verify_graph(graph)
    return graph


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
        self.tensors.append(
            {
                "name": name,
                "bytes": size_bytes,
                "producer": producer,
                "role": role,
                "alias_of": alias_of,
            }
        )
        return len(self.tensors) - 1

    def op(
        self,
        name: str,
        kind: str = "op",
        *,
        reads: Iterable[int] = (),
        phase: Phase = Phase.FORWARD,
        dtype: str = "float32",
        flops: float = 0.0,
        bytes_touched: int = 0,
        workspace_bytes: int = 0,
        partner: int = -1,
        group: int = -1,
        rng_order: int = -1,
        stream: Stream = Stream.COMPUTE,
        module: str = "",
        signature: str = "",
    ) -> int:
        """Add an op that reads the given tensors and return its number."""
        self.ops.append(
            {
                "name": name,
                "kind": kind,
                "phase": phase,
                "dtype": DTYPES.index(dtype),
                "flops": flops,
                "bytes_touched": bytes_touched,
                "workspace_bytes": workspace_bytes,
                "partner": partner,
                "group": group,
                "rng_order": rng_order,
                "stream": stream,
                "module": module,
                "signature": signature,
            }
        )
        self.op_reads.append(list(reads))
        return len(self.ops) - 1

    def read(self, op: int, tensor: int) -> None:
        """Add a tensor to the inputs of an op."""
        self.op_reads[op].append(tensor)

    def build(
        self, *, stated: StatedTimes | None = None, meta: Mapping[str, Any] | None = None
    ) -> Graph:
        """Return the finished, verified graph."""
        op_fields = OpColumns.__dataclass_fields__
        columns = OpColumns(**{key: [op[key] for op in self.ops] for key in op_fields})
        tensor_fields = TensorColumns.__dataclass_fields__
        tensors = TensorColumns(**{key: [t[key] for t in self.tensors] for key in tensor_fields})
        lengths = [len(reads) for reads in self.op_reads]
        read_ptr = pointers(lengths)
        flat = [tensor for reads in self.op_reads for tensor in reads]
        return assemble(self.name, columns, tensors, read_ptr, flat, stated=stated, meta=meta)


def _require_indices(
    ops: OpColumns, tensors: TensorColumns, producer: IntArray, read_ptr: Any, reads: IntArray
) -> None:
    """Raise on indices out of range, before anything is sorted by them."""
    num_ops, num_tensors = len(ops.name), len(tensors.name)
    if (
        len(read_ptr) != num_ops + 1
        or read_ptr[0] != 0
        or read_ptr[-1] != len(reads)
        or np.any(np.diff(read_ptr) < 0)
    ):
        raise InputFileError("the table of reads does not match the number of ops")
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


def topological_order(
    names: Sequence[str], producer: IntArray, read_ptr: Any, reads: IntArray
) -> IntArray:
    """Return a topological order of the ops: the given order if it is one.

    Raises `InputFileError` with the name of an op that depends on itself.
    """
    num_ops = len(names)
    reader = np.repeat(np.arange(num_ops, dtype=np.int32), np.diff(read_ptr))
    made_by = producer[reads] if len(reads) else np.empty(0, dtype=np.int32)
    if np.all(made_by < reader):
        return np.arange(num_ops, dtype=np.int32)
    inner = made_by >= 0
    src, dst = made_by[inner], reader[inner]
    waiting = np.bincount(dst, minlength=num_ops).tolist()
    by_src = np.argsort(src, kind="stable")
    start = np.searchsorted(src[by_src], np.arange(num_ops + 1)).tolist()
    targets = dst[by_src].tolist()
    ready = [op for op in range(num_ops) if waiting[op] == 0]
    order: list[int] = []
    while ready:
        op = heapq.heappop(ready)
        order.append(op)
        for target in targets[start[op] : start[op + 1]]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, target)
    if len(order) < num_ops:
        stuck = next(op for op in range(num_ops) if waiting[op] > 0)
        raise InputFileError(
            f"op {names[stuck]!r} depends on itself through a cycle",
            hint="remove one of the dependencies of the cycle",
        )
    return np.array(order, dtype=np.int32)


def _sorted_reads(
    op_order: IntArray, tensor_rank: IntArray, read_ptr: Any, reads: IntArray
) -> tuple[Any, IntArray]:
    """Return the reads with new numbers, ascending and without repetition within each op."""
    num_ops, num_tensors = len(op_order), max(len(tensor_rank), 1)
    op_rank = positions(op_order)
    reader = np.repeat(op_rank, np.diff(read_ptr))
    key = distinct(reader * num_tensors + (tensor_rank[reads] if len(reads) else reads))
    counts = np.bincount(key // num_tensors, minlength=num_ops)
    ptr = pointers(counts)
    return ptr, (key % num_tensors).astype(np.int32)


def _taken(texts: Sequence[str], order: IntArray) -> list[str]:
    """Return the strings in a new order; none if the column is empty."""
    return [texts[i] for i in order.tolist()] if len(texts) else []


def _column(values: Any, count: int, default: float, dtype: Any) -> Any:
    if len(values) == 0:
        return np.full(count, default, dtype=dtype)
    if len(values) != count:
        raise InputFileError(
            f"a column has {len(values)} entries, expected {count}",
            hint="every column has one entry per op or per tensor, or none at all",
        )
    return np.asarray(values, dtype=dtype)


def _interned(
    values: Sequence[str] | Interned, order: IntArray
) -> tuple[tuple[str, ...], IntArray]:
    """Distinct strings in order of first appearance, and the index of each; '' becomes -1."""
    if isinstance(values, Interned):
        used, first, index = np.unique(
            values.numbers[order], return_index=True, return_inverse=True
        )
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
