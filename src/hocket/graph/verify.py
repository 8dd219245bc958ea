"""Prove that a Graph is well formed, naming the op or tensor that is not. O(ops + reads), numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.errors import InputFileError
from hocket.graph.graph import DTYPES, PERSISTENT_ROLES, Graph, Phase, Role

MAX_BYTES = 2**50
"""A tensor or workspace beyond one pebibyte is taken for a mistake."""
MAX_FLOPS = 1e24
MAX_TOTAL_BYTES = 2**62

_OP_COLUMNS = (
    "op_kind",
    "op_module",
    "op_signature",
    "op_phase",
    "op_dtype",
    "flops",
    "bytes_touched",
    "workspace_bytes",
    "partner",
    "group",
    "rng_order",
)
_TENSOR_COLUMNS = ("tensor_bytes", "tensor_role", "tensor_producer", "alias_of")


def verify_graph(graph: Graph) -> None:
    """Raise `InputFileError` naming the first offending op or tensor."""
    _verify_columns(graph)
    _verify_ops(graph)
    _verify_tensors(graph)
    _verify_stated(graph)


def _verify_columns(graph: Graph) -> None:
    for name, length, items in (
        ("op", graph.num_ops, graph.op_names),
        ("tensor", graph.num_tensors, graph.tensor_names),
    ):
        if len(set(items)) < length:
            seen: set[str] = set()
            twice = next(item for item in items if item in seen or seen.add(item))  # type: ignore[func-returns-value]
            raise InputFileError(f"two {name}s have the name {twice!r}", hint="names must differ")
        if "" in items:
            raise InputFileError(f"{name} {items.index('')} has no name", hint="give it one")
    for column in _OP_COLUMNS:
        _require_length(graph, column, graph.num_ops)
    for column in _TENSOR_COLUMNS:
        _require_length(graph, column, graph.num_tensors)


def _require_length(graph: Graph, column: str, length: int) -> None:
    actual = len(getattr(graph, column))
    if actual != length:
        raise InputFileError(f"column {column!r} has {actual} entries, expected {length}")


def _verify_ops(graph: Graph) -> None:
    names = graph.op_names
    op = _first(~((graph.flops >= 0) & (graph.flops <= MAX_FLOPS)))
    _refuse(op, names, "flops", graph.flops, f"must be between 0 and {MAX_FLOPS:g}")
    for label in ("bytes_touched", "workspace_bytes"):
        values = getattr(graph, label)
        op = _first((values < 0) | (values > MAX_BYTES))
        _refuse(op, names, label, values, "must be between 0 and 2**50")
    for label, values, count in (
        ("phase", graph.op_phase, len(Phase)),
        ("dtype", graph.op_dtype, len(DTYPES)),
        ("kind", graph.op_kind, len(graph.kinds)),
    ):
        op = _first((values < 0) | (values >= count))
        _refuse(op, names, label, values, f"must be below {count}")
    paired = graph.partner >= 0
    if graph.num_ops:
        partner_phase = graph.op_phase[graph.partner]
        op = _first(paired & (partner_phase != Phase.FORWARD))
        _refuse(op, names, "partner", graph.partner, "must be a forward op")
    drawn = graph.rng_order[graph.rng_order >= 0]
    if len(np.unique(drawn)) < len(drawn):
        values, counts = np.unique(drawn, return_counts=True)
        op = _first(graph.rng_order == values[counts > 1][0])
        _refuse(op, names, "rng_order", graph.rng_order, "is used twice")
    if float(graph.tensor_bytes.sum(dtype=np.float64)) > MAX_TOTAL_BYTES:
        raise InputFileError("all tensors together exceed 2**62 bytes", hint="check the sizes")


def _verify_tensors(graph: Graph) -> None:
    names, producer = graph.tensor_names, graph.tensor_producer
    tensor = _first((graph.tensor_bytes < 0) | (graph.tensor_bytes > MAX_BYTES))
    _refuse(tensor, names, "bytes", graph.tensor_bytes, "must be between 0 and 2**50", "tensor")
    tensor = _first((graph.tensor_role < 0) | (graph.tensor_role >= len(Role)))
    _refuse(tensor, names, "role", graph.tensor_role, f"must be below {len(Role)}", "tensor")
    exists_before = np.isin(graph.tensor_role, PERSISTENT_ROLES) & (graph.alias_of < 0)
    tensor = _first(exists_before & (producer >= 0))
    _refuse(tensor, names, "role", graph.tensor_role, "exists before the step: no op makes it",
            "tensor")  # fmt: skip
    tensor = _first((graph.tensor_role == Role.CONTROL) & (graph.tensor_bytes > 0))
    _refuse(tensor, names, "bytes", graph.tensor_bytes, "of a control tensor must be 0", "tensor")
    tensor = _first(~np.isin(graph.tensor_role, PERSISTENT_ROLES) & (producer < 0))
    _refuse(tensor, names, "producer", producer, "is missing for a tensor of this role", "tensor")
    if np.any(np.diff(producer) < 0):
        raise InputFileError("tensors do not stand in the order of their producers")
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.read_ptr))
    late = _first(graph.tensor_producer[graph.reads] >= reader)
    if late is not None:
        raise InputFileError(
            f"op {graph.op_names[reader[late]]!r} reads {names[graph.reads[late]]!r} "
            "before it is made"
        )
    _verify_aliases(graph, reader)


def _verify_aliases(graph: Graph, reader: Any) -> None:
    alias = np.flatnonzero(graph.alias_of >= 0)
    if not len(alias):
        return
    count = max(graph.num_tensors, 1)
    # An alias lives where its base is: its producer must read the base, or it aliases a tensor
    # that exists before the step while doing so itself.
    wanted = graph.tensor_producer[alias].astype(np.int64) * count + graph.alias_of[alias]
    present = np.isin(wanted, reader.astype(np.int64) * count + graph.reads)
    before = (graph.tensor_producer[alias] < 0) & (graph.tensor_producer[graph.alias_of[alias]] < 0)
    wrong = _first(~(present | before))
    if wrong is not None:
        tensor = int(alias[wrong])
        raise InputFileError(
            f"tensor {graph.tensor_names[tensor]!r} aliases "
            f"{graph.tensor_names[graph.alias_of[tensor]]!r}, which its producer does not read"
        )


def _verify_stated(graph: Graph) -> None:
    if graph.stated is None:
        return
    for kind, seconds in graph.stated.op_s.items():
        if len(seconds) != graph.num_ops:
            raise InputFileError(f"stated times of {kind!r} do not match the number of ops")
        op = _first(~(seconds >= 0))
        _refuse(op, graph.op_names, "stated time", seconds, "must be 0 or more")
    tensor_s = graph.stated.tensor_s
    if tensor_s is not None:
        if len(tensor_s) != graph.num_tensors:
            raise InputFileError("stated transfer times do not match the number of tensors")
        tensor = _first(~((tensor_s >= 0) & np.isfinite(tensor_s)))
        _refuse(tensor, graph.tensor_names, "stated time", tensor_s, "must be finite", "tensor")


def _first(mask: Any) -> int | None:
    index = np.flatnonzero(mask)
    return int(index[0]) if len(index) else None


def _refuse(
    index: int | None, names: tuple[str, ...], label: str, values: Any, rule: str, what: str = "op"
) -> None:
    if index is not None:
        raise InputFileError(f"{label} of {what} {names[index]!r} is {values[index]}: {rule}")
