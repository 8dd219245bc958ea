"""Verify that a Graph is well formed; errors name the op or tensor that is not.

Strings and lengths are checked first, then every index, then values and order, so that each check
can rely on the ones before it, and any array content results in either success or `InputFileError`.
O(ops + reads), numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import InputFileError
from hocket.graph.columns import OP_COLUMNS, TENSOR_COLUMNS
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role

MAX_SECONDS = 1e9
MAX_TOTAL_BYTES = 2**62
MAX_TEXT_LENGTH = 10_000
"""Maximum characters in a name, a kind, a module path or a signature."""


def verify_graph(graph: Graph) -> None:
    """Raise `InputFileError` naming the first offending op or tensor."""
    _verify_texts(graph)
    _verify_lengths(graph)
    _verify_ranges(graph)
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
            repeated, _ = Counter(texts).most_common(1)[0]
            raise InputFileError(
                f"two {what}s have the name {repeated!r}", hint="names must differ"
            )


def _require_text(what: str, texts: Sequence[str]) -> None:
    """Raise on empty or long strings, and on control characters, which could control a terminal."""
    # One test of all texts together, because a graph has up to a million of them.
    longest = max(map(len, texts), default=0)
    if "".join(texts).isprintable() and all(texts) and longest <= MAX_TEXT_LENGTH:
        return
    for index, text in enumerate(texts):
        problem = ""
        if not text:
            problem = "is empty"
        elif len(text) > MAX_TEXT_LENGTH:
            problem = f"has {len(text)} characters: {text[:40]!r}…"
        elif not text.isprintable():
            problem = f"has characters that cannot be printed: {text[:100]!r}"
        if problem:
            raise InputFileError(
                f"{what} {index} {problem}",
                hint=f"names have 1 to {MAX_TEXT_LENGTH} printable characters",
            )


def _verify_lengths(graph: Graph) -> None:
    lengths = {column.field: graph.num_ops for column in OP_COLUMNS}
    lengths |= {column.field: graph.num_tensors for column in TENSOR_COLUMNS}
    for field, length in lengths.items():
        if len(getattr(graph, field)) != length:
            raise InputFileError(
                f"column {field!r} has {len(getattr(graph, field))} entries, expected {length}",
                hint="every column has one entry per op or per tensor",
            )
    require_read_table(graph.op_names, graph.read_ptr, graph.reads)


def require_read_table(op_names: Sequence[str], ptr: LongArray, reads: IntArray) -> None:
    """Raise unless ``ptr`` divides the reads into one range per op."""
    if len(ptr) != len(op_names) + 1 or ptr[0] != 0 or ptr[-1] != len(reads):
        raise InputFileError(
            "the table of reads does not match the number of ops",
            hint="read_ptr starts at 0, has one more entry than there are ops and ends at the "
            "number of reads",
        )
    falling = _first(np.diff(ptr) < 0)
    if falling is not None:
        raise InputFileError(
            f"the reads of op {op_names[falling]!r} end before they start",
            hint="read_ptr never decreases",
        )


def _verify_ranges(graph: Graph) -> None:
    for what, names, columns in (
        ("op", graph.op_names, OP_COLUMNS),
        ("tensor", graph.tensor_names, TENSOR_COLUMNS),
    ):
        for column in columns:
            values, high = getattr(graph, column.field), column.high_in(graph)
            # Written so that nan is out of range, too.
            wrong = _first(~((values >= column.low) & (values <= high)))
            rule = f"it must be from {column.low} to {high:.10g}"
            _refuse(wrong, names, what, column.key, values, rule)
    num_tensors = graph.num_tensors
    dangling = _first((graph.reads < 0) | (graph.reads >= num_tensors))
    if dangling is not None:
        op = int(np.searchsorted(graph.read_ptr, dangling, side="right")) - 1
        raise InputFileError(
            f"op {graph.op_names[op]!r} reads tensor {int(graph.reads[dangling])}, "
            f"which does not exist (there are {num_tensors})",
            hint="ids must point at tensors of the same graph",
        )


def _verify_values(graph: Graph) -> None:
    ops = graph.op_names
    for what, values in (
        ("bytes_touched of all ops", graph.bytes_touched),
        ("workspace_bytes of all ops", graph.workspace_bytes),
        ("bytes of all tensors", graph.tensor_bytes),
    ):
        if float(values.sum(dtype=np.float64)) > MAX_TOTAL_BYTES:
            raise InputFileError(f"the {what} together exceed 2**62", hint="check the sizes")
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
    # The sentinel keeps the search within the array.
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
    # Each round doubles the length of followed chains, so this many rounds reach every root.
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
        _require_seconds(f"stated time on {kind!r}", "op", graph.op_names, seconds)
    tensor_s = graph.stated.tensor_s
    if tensor_s is not None:
        _require_seconds("stated transfer time", "tensor", graph.tensor_names, tensor_s)


def _require_seconds(label: str, what: str, names: Sequence[str], seconds: FloatArray) -> None:
    """Raise unless there is one valid time per name; only ops may have an infinite time."""
    if len(seconds) != len(names):
        raise InputFileError(
            f"{label} has {len(seconds)} entries, expected {len(names)}",
            hint="state one time per op, and one per tensor for transfers",
        )
    # Only ops may have infinite times: a transfer that never ends has no meaning.
    cannot_run = np.isposinf(seconds) & (what == "op")
    wrong = _first(~((seconds >= 0) & ((seconds <= MAX_SECONDS) | cannot_run)))
    rule = f"it must be between 0 and {MAX_SECONDS:g}; an op that cannot run takes infinite time"
    _refuse(wrong, names, what, label, seconds, rule)


def _first(mask: Any) -> int | None:
    index = np.flatnonzero(mask)
    return int(index[0]) if len(index) else None


def _refuse(
    index: int | None, names: Sequence[str], what: str, label: str, values: Any, rule: str
) -> None:
    if index is not None:
        raise InputFileError(f"{label} of {what} {names[index]!r} is {values[index]}", hint=rule)
