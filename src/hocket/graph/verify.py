"""Verify that a Graph is well formed; errors name the op or tensor that is not.

Strings and lengths are checked first, then every index, then values and order, so that each check
can rely on the ones before it, and any array content results in either success or `InputFileError`.
O(ops + reads), numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.base.errors import InputFileError
from hocket.graph.graph import DTYPES, PERSISTENT_ROLES, Graph, Phase, Role, Stream

MAX_BYTES = 2**50
"""Bytes of a tensor or workspace above which it is considered a mistake (one pebibyte)."""
MAX_FLOPS = 1e24
MAX_SECONDS = 1e9
MAX_TOTAL_BYTES = 2**62
MAX_TEXT_LENGTH = 10_000
"""Maximum characters in a name, a kind, a module path or a signature."""

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
    "op_stream",
)
_TENSOR_COLUMNS = ("tensor_bytes", "tensor_role", "tensor_producer", "alias_of")
_NO_LIMIT = 2**31


def verify_graph(graph: Graph) -> None:
    """Raise `InputFileError` naming the first offending op or tensor."""
    _verify_texts(graph)
    _verify_lengths(graph)
    _verify_indices(graph)
    _verify_values(graph)
    _verify_roles(graph)
    _verify_order(graph)
    _verify_aliases(graph)
    _verify_stated(graph)


def _verify_texts(graph: Graph) -> None:
    _require_text("name of the graph", (graph.name,) if graph.name else ())
    for what, texts in (
        ("op", graph.op_names),
        ("tensor", graph.tensor_names),
        ("kind", graph.kinds),
        ("module", graph.modules),
        ("signature", graph.signatures),
    ):
        _require_text(f"name of {what}" if what in ("op", "tensor") else what, texts)
        if len(set(texts)) < len(texts):
            raise InputFileError(
                f"two {what}s have the name {_first_repeated(texts)!r}", hint="names must differ"
            )


def _require_text(what: str, texts: Sequence[str]) -> None:
    """Raise on empty or long strings, and on control characters, which could control a terminal."""
    joined = "".join(texts)
    longest = max(map(len, texts), default=0)
    if joined.isprintable() and all(texts) and longest <= MAX_TEXT_LENGTH:
        return
    for index, text in enumerate(texts):
        if not text:
            raise InputFileError(f"{what} {index} is empty", hint="give it a name")
        if len(text) > MAX_TEXT_LENGTH:
            raise InputFileError(
                f"{what} {index} has {len(text)} characters: {text[:40]!r}…",
                hint=f"{MAX_TEXT_LENGTH} characters are allowed",
            )
        if not text.isprintable():
            raise InputFileError(
                f"{what} {index} has characters that cannot be printed: {text[:100]!r}",
                hint="use letters, digits, signs and plain spaces",
            )


def _first_repeated(texts: Sequence[str]) -> str:
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            return text
        seen.add(text)
    raise AssertionError("unreachable: called only where a text is repeated")


def _verify_lengths(graph: Graph) -> None:
    for columns, length in ((_OP_COLUMNS, graph.num_ops), (_TENSOR_COLUMNS, graph.num_tensors)):
        for column in columns:
            actual = len(getattr(graph, column))
            if actual != length:
                raise InputFileError(
                    f"column {column!r} has {actual} entries, expected {length}",
                    hint="every column has one entry per op or per tensor",
                )
    ptr = graph.read_ptr
    if len(ptr) != graph.num_ops + 1 or ptr[0] != 0 or ptr[-1] != len(graph.reads):
        raise InputFileError(
            "the table of reads does not match the number of ops",
            hint="read_ptr starts at 0, has one more entry than there are ops and ends at the "
            "number of reads",
        )
    falling = _first(np.diff(ptr) < 0)
    if falling is not None:
        raise InputFileError(
            f"the reads of op {graph.op_names[falling]!r} end before they start",
            hint="read_ptr never decreases",
        )


def _verify_indices(graph: Graph) -> None:
    num_ops, num_tensors = graph.num_ops, graph.num_tensors
    for label, values, low, stop in (
        ("phase", graph.op_phase, 0, len(Phase)),
        ("dtype", graph.op_dtype, 0, len(DTYPES)),
        ("kind", graph.op_kind, 0, len(graph.kinds)),
        ("module", graph.op_module, -1, len(graph.modules)),
        ("signature", graph.op_signature, -1, len(graph.signatures)),
        ("partner", graph.partner, -1, num_ops),
        ("group", graph.group, -1, _NO_LIMIT),
        ("rng_order", graph.rng_order, -1, _NO_LIMIT),
        ("stream", graph.op_stream, 0, len(Stream)),
    ):
        _require_range(graph.op_names, "op", label, values, low, stop)
    for label, values, low, stop in (
        ("role", graph.tensor_role, 0, len(Role)),
        ("producer", graph.tensor_producer, -1, num_ops),
        ("alias_of", graph.alias_of, -1, num_tensors),
    ):
        _require_range(graph.tensor_names, "tensor", label, values, low, stop)
    dangling = _first((graph.reads < 0) | (graph.reads >= num_tensors))
    if dangling is not None:
        op = int(np.searchsorted(graph.read_ptr, dangling, side="right")) - 1
        raise InputFileError(
            f"op {graph.op_names[op]!r} reads tensor {int(graph.reads[dangling])}, "
            f"which does not exist (there are {num_tensors})",
            hint="ids must point at tensors of the same graph",
        )


def _require_range(
    names: Sequence[str], what: str, label: str, values: Any, low: int, stop: int
) -> None:
    wrong = _first((values < low) | (values >= stop))
    _refuse(wrong, names, what, label, values, f"it must be at least {low} and below {stop}")


def _verify_values(graph: Graph) -> None:
    ops = graph.op_names
    wrong = _first(~((graph.flops >= 0) & (graph.flops <= MAX_FLOPS)))
    _refuse(wrong, ops, "op", "flops", graph.flops, f"it must be between 0 and {MAX_FLOPS:g}")
    for names, what, label, values in (
        (ops, "op", "bytes_touched", graph.bytes_touched),
        (ops, "op", "workspace_bytes", graph.workspace_bytes),
        (graph.tensor_names, "tensor", "bytes", graph.tensor_bytes),
    ):
        wrong = _first((values < 0) | (values > MAX_BYTES))
        _refuse(wrong, names, what, label, values, "it must be between 0 and 2**50")
        if float(values.sum(dtype=np.float64)) > MAX_TOTAL_BYTES:
            raise InputFileError(
                f"the {label} of all {what}s together exceed 2**62", hint="check the sizes"
            )
    if graph.num_ops:
        paired_phase = np.where(graph.partner >= 0, graph.op_phase[graph.partner], Phase.FORWARD)
        wrong = _first(paired_phase != Phase.FORWARD)
        _refuse(wrong, ops, "op", "partner", graph.partner, "a partner must be a forward op")
    drawn = graph.rng_order[graph.rng_order >= 0]
    values, counts = np.unique(drawn, return_counts=True)
    if np.any(counts > 1):
        wrong = _first(graph.rng_order == values[counts > 1][0])
        _refuse(wrong, ops, "op", "rng_order", graph.rng_order, "no two ops share a position")


def _verify_roles(graph: Graph) -> None:
    names, role, producer = graph.tensor_names, graph.tensor_role, graph.tensor_producer
    persistent = np.isin(role, PERSISTENT_ROLES)
    for mask, rule in (
        (
            persistent & (graph.alias_of < 0) & (producer >= 0),
            "it exists before the step, so no op makes it unless as an alias of an older version",
        ),
        (~persistent & (producer < 0), "a tensor of this role needs an op that makes it"),
        ((role == Role.CONTROL) & (graph.tensor_bytes > 0), "a control tensor has 0 bytes"),
    ):
        wrong = _first(mask)
        if wrong is not None:
            raise InputFileError(
                f"tensor {names[wrong]!r} has the role {Role(int(role[wrong])).name.lower()}, "
                f"producer {int(producer[wrong])} and {int(graph.tensor_bytes[wrong])} bytes",
                hint=rule,
            )


def _verify_order(graph: Graph) -> None:
    names, producer, reader = graph.tensor_names, graph.tensor_producer, graph.reader
    wrong = _first(np.diff(producer) < 0)
    if wrong is not None:
        raise InputFileError(
            f"tensor {names[wrong + 1]!r} comes after {names[wrong]!r}, which a later op produces",
            hint="sort tensors by the ops that produce them",
        )
    late = _first(producer[graph.reads] >= reader)
    if late is not None:
        raise InputFileError(
            f"op {graph.op_names[reader[late]]!r} reads {names[graph.reads[late]]!r} "
            "before it is made",
            hint="put the ops into an order in which each reads only what earlier ones make; "
            "a cycle has no such order",
        )
    unsorted = _first((np.diff(graph.reads) <= 0) & (np.diff(reader) == 0))
    if unsorted is not None:
        raise InputFileError(
            f"op {graph.op_names[reader[unsorted]]!r} reads {names[graph.reads[unsorted + 1]]!r} "
            "twice or out of order",
            hint="an op reads each tensor once, ascending",
        )


def _verify_aliases(graph: Graph) -> None:
    alias = np.flatnonzero(graph.alias_of >= 0)
    if not len(alias):
        return
    count = graph.num_tensors
    base = graph.alias_of[alias]
    # An alias lives where its base is: its producer must read the base, or both of them exist
    # before the step.
    wanted = graph.tensor_producer[alias].astype(np.int64) * count + base
    present = np.append(graph.reader * count + graph.reads, np.iinfo(np.int64).max)
    read_by_producer = present[np.searchsorted(present, wanted)] == wanted
    before = (graph.tensor_producer[alias] < 0) & (graph.tensor_producer[base] < 0)
    wrong = _first(~(read_by_producer | before))
    if wrong is not None:
        raise InputFileError(
            f"tensor {graph.tensor_names[alias[wrong]]!r} aliases "
            f"{graph.tensor_names[base[wrong]]!r}, which its producer does not read",
            hint="a view reads the tensor whose storage it shares",
        )
    _verify_alias_roots(graph)


def _verify_alias_roots(graph: Graph) -> None:
    """Raise if tensors that exist before the step alias each other in a cycle."""
    root = np.where(graph.alias_of >= 0, graph.alias_of, np.arange(graph.num_tensors))
    for _ in range(graph.num_tensors.bit_length()):
        root = root[root]
    wrong = _first(graph.alias_of[root] >= 0)
    if wrong is not None:
        raise InputFileError(
            f"tensor {graph.tensor_names[wrong]!r} is an alias of itself through others",
            hint="one tensor of the ring must own the storage: give it alias_of -1",
        )


def _verify_stated(graph: Graph) -> None:
    if graph.stated is None:
        return
    _require_text("stated device kind", tuple(graph.stated.op_s))
    for kind, seconds in graph.stated.op_s.items():
        _require_stated_length(f"stated times of {kind!r}", len(seconds), graph.num_ops)
        wrong = _first(~((seconds >= 0) & ((seconds <= MAX_SECONDS) | np.isposinf(seconds))))
        rule = f"it must be between 0 and {MAX_SECONDS:g}, or infinite where the op cannot run"
        _refuse(wrong, graph.op_names, "op", f"stated time on {kind!r}", seconds, rule)
    tensor_s = graph.stated.tensor_s
    if tensor_s is not None:
        _require_stated_length("stated transfer times", len(tensor_s), graph.num_tensors)
        wrong = _first(~((tensor_s >= 0) & (tensor_s <= MAX_SECONDS)))
        rule = f"it must be between 0 and {MAX_SECONDS:g}"
        _refuse(wrong, graph.tensor_names, "tensor", "stated transfer time", tensor_s, rule)


def _require_stated_length(what: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise InputFileError(
            f"{what} have {actual} entries, expected {expected}",
            hint="state one time per op, and one per tensor for transfers",
        )


def _first(mask: Any) -> int | None:
    index = np.flatnonzero(mask)
    return int(index[0]) if len(index) else None


def _refuse(
    index: int | None, names: Sequence[str], what: str, label: str, values: Any, rule: str
) -> None:
    if index is not None:
        raise InputFileError(f"{label} of {what} {names[index]!r} is {values[index]}", hint=rule)
