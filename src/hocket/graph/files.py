"""Read graph files of any known format; write hocket.graph/1.

Formats are recognised by content, never by name, and each may be gzipped: hocket.graph/1, the JSON
of dnn-partitioning, and PipeDream's ``graph.txt``. Other files are rejected after their first 64
KiB.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base import fields
from hocket.base.arrays import FloatArray, LongArray
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError
from hocket.base.jsonfile import dump_json, looks_like_json, parse_json, read_bounded
from hocket.graph.columns import (
    MAX_BYTES,
    MAX_FLOPS,
    MAX_INDEX,
    OP_COLUMNS,
    TENSOR_COLUMNS,
    Column,
)
from hocket.graph.graph import Graph, OtherBatch, StatedTimes
from hocket.graph.verify import MAX_SECONDS, verify_graph

__all__ = ["graph_from_dict", "graph_to_dict", "read_graph", "write_graph"]


# hocket.graph/1: the native file format, one list per column of the Graph.
#
# The file is the Graph as it is: ops in topological order, tensors in the order of their producers.
# Columns whose entries are all the default are left out. O(ops + reads) in numpy and the JSON
# parser, so that a million ops take seconds.

GRAPH_SCHEMA = "hocket.graph/1"

_LENGTHS = "every column has one entry per op or per tensor, or is left out"


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """Return the graph as plain JSON values in the layout of hocket.graph/1."""
    ops = {"name": list(graph.op_names), **_written(graph, OP_COLUMNS)}
    other = {} if graph.other_batch is None else {"other_batch": _other_data(graph.other_batch)}
    return {
        "schema": GRAPH_SCHEMA,
        "name": graph.name,
        "meta": dict(graph.meta),
        "kinds": list(graph.kinds),
        "modules": list(graph.modules),
        "signatures": list(graph.signatures),
        "ops": ops,
        "tensors": {"name": list(graph.tensor_names), **_written(graph, TENSOR_COLUMNS)},
        "reads": {"ptr": graph.read_ptr.tolist(), "tensor": graph.reads.tolist()},
        "stated": _stated_to_dict(graph.stated),
        **other,
    }


def graph_from_dict(data: object, where: str) -> Graph:
    """Return the verified graph of a parsed hocket.graph/1 file; ``where`` names it in errors."""
    with fields.located(where):
        return _graph_from_dict(data)


def _written(graph: Graph, columns: tuple[Column, ...]) -> dict[str, list[Any]]:
    written = {}
    for column in columns:
        values = getattr(graph, column.field)
        if column.default is None or np.any(values != column.default):
            written[column.key] = values.tolist()
    return written


def _stated_to_dict(stated: StatedTimes | None) -> dict[str, Any] | None:
    if stated is None:
        return None
    # JSON has no infinity; null stands for an op that cannot run on that kind of device.
    op_s = {
        kind: [None if s == np.inf else s for s in seconds.tolist()]
        for kind, seconds in stated.op_s.items()
    }
    return {
        "op_s": op_s,
        "tensor_s": None if stated.tensor_s is None else stated.tensor_s.tolist(),
    }


def _graph_from_dict(data: object) -> Graph:
    file = fields.record(
        data,
        "the file",
        required=("schema", "kinds", "ops", "tensors", "reads"),
        optional=("name", "meta", "modules", "signatures", "stated", "other_batch"),
    )
    fields.choice(file["schema"], "schema", (GRAPH_SCHEMA,))
    ops = fields.record(
        file["ops"],
        "ops",
        required=("name", "kind"),
        optional=tuple(column.key for column in OP_COLUMNS),
    )
    tensors = fields.record(
        file["tensors"],
        "tensors",
        required=("name", "bytes", "producer"),
        optional=tuple(column.key for column in TENSOR_COLUMNS),
    )
    reads = fields.record(file["reads"], "reads", required=("ptr", "tensor"))
    op_names = fields.text_column(ops["name"], "ops.name")
    tensor_names = fields.text_column(tensors["name"], "tensors.name")
    if not op_names:
        raise InputFileError("the graph has no ops", hint="a graph needs at least one op")
    graph = Graph(
        name=fields.text(file.get("name", ""), "name"),
        op_names=tuple(op_names),
        kinds=tuple(fields.text_column(file["kinds"], "kinds")),
        modules=tuple(fields.text_column(file.get("modules", []), "modules")),
        signatures=tuple(fields.text_column(file.get("signatures", []), "signatures")),
        **_read(ops, "ops", OP_COLUMNS, len(op_names)),
        tensor_names=tuple(tensor_names),
        **_read(tensors, "tensors", TENSOR_COLUMNS, len(tensor_names)),
        read_ptr=_ints(reads["ptr"], "reads.ptr", 0, MAX_INDEX, len(op_names) + 1),
        reads=fields.int_column(reads["tensor"], "reads.tensor", 0, MAX_INDEX).astype(np.int32),
        stated=_stated(file.get("stated"), len(op_names), len(tensor_names)),
        other_batch=_other_batch(file.get("other_batch"), len(op_names), len(tensor_names)),
        meta=dict(fields.mapping(file.get("meta", {}), "meta")),
    )
    verify_graph(graph)
    return graph


_OTHER_COLUMNS = ("flops", "bytes_touched", "workspace_bytes", "tensor_bytes")


def _other_data(other: OtherBatch) -> dict[str, Any]:
    return {
        "samples": other.num_samples,
        "other_samples": other.other_samples,
        "signatures": list(other.signatures),
        "signature": other.op_signature.tolist(),
        **{name: getattr(other, name).tolist() for name in _OTHER_COLUMNS},
    }


def _other_batch(value: object, num_ops: int, num_tensors: int) -> OtherBatch | None:
    if value is None:
        return None
    path = "other_batch"
    entry = fields.record(
        value,
        path,
        required=("samples", "other_samples", "signatures", "signature", *_OTHER_COLUMNS),
    )
    num_samples = fields.integer(entry["samples"], f"{path}.samples", 1, MAX_INDEX)
    other_samples = fields.integer(entry["other_samples"], f"{path}.other_samples", 1, MAX_INDEX)
    if num_samples == other_samples:
        raise InputFileError(
            f"{path} has the same {num_samples} samples as the graph",
            hint="capture the model again",
        )
    texts = tuple(fields.text_column(entry["signatures"], f"{path}.signatures"))
    last = len(texts) - 1
    signature = _ints(entry["signature"], f"{path}.signature", -1, last, num_ops)
    return OtherBatch(
        num_samples=num_samples,
        other_samples=other_samples,
        signatures=texts,
        op_signature=signature.astype(np.int32),
        flops=_floats(entry["flops"], f"{path}.flops", MAX_FLOPS, num_ops),
        tensor_bytes=_ints(
            entry["tensor_bytes"], f"{path}.tensor_bytes", 0, MAX_BYTES, num_tensors
        ),
        **{
            name: _ints(entry[name], f"{path}.{name}", 0, MAX_BYTES, num_ops)
            for name in ("bytes_touched", "workspace_bytes")
        },
    )


def _read(
    section: Mapping[str, Any], path: str, columns: tuple[Column, ...], length: int
) -> dict[str, Any]:
    """Return the fields of a graph that a section of the file states, with defaults for others."""
    return {
        column.field: _numbers(section[column.key], f"{path}.{column.key}", column, length)
        if column.key in section
        else np.full(length, column.default, dtype=column.dtype)
        for column in columns
    }


def _numbers(value: object, path: str, column: Column, length: int) -> NDArray[np.number[Any]]:
    if column.dtype is np.float64:
        return _floats(value, path, column.high, length)
    return _ints(value, path, column.low, column.high, length).astype(column.dtype)


def _stated(value: object, num_ops: int, num_tensors: int) -> StatedTimes | None:
    if value is None:
        return None
    stated = fields.record(value, "stated", required=("op_s",), optional=("tensor_s",))
    op_s = {
        kind: _op_seconds(seconds, fields.inside("stated.op_s", kind), num_ops)
        for kind, seconds in sorted(fields.mapping(stated["op_s"], "stated.op_s").items())
    }
    tensor_s = stated.get("tensor_s")
    if tensor_s is None:
        return StatedTimes(op_s)
    return StatedTimes(op_s, _floats(tensor_s, "stated.tensor_s", MAX_SECONDS, num_tensors))


def _op_seconds(value: object, path: str, num_ops: int) -> FloatArray:
    seconds = fields.sized(value, path, num_ops, _LENGTHS)
    cannot_run = np.array([s is None for s in seconds], dtype=np.bool_)
    finite = fields.float_column([0.0 if s is None else s for s in seconds], path, 0, MAX_SECONDS)
    return np.where(cannot_run, np.inf, finite)


def _ints(value: object, path: str, low: int, high: int, length: int) -> LongArray:
    return fields.int_column(fields.sized(value, path, length, _LENGTHS), path, low, high)


def _floats(value: object, path: str, high: float, length: int) -> FloatArray:
    return fields.float_column(fields.sized(value, path, length, _LENGTHS), path, 0, high)


MAX_FILE_BYTES = 512 * 2**20
"""Limit on the decompressed size; a million ops take about a third of it."""
_GZIP_LEVEL = 3
"""Makes files a fifth larger than the default level, in a third of the time."""
_FORMATS = f"a graph: {GRAPH_SCHEMA} or dnn-partitioning JSON, or a PipeDream graph.txt"


def read_graph(path: str | Path) -> Graph:
    """Read and verify a graph file in any known format; raises `InputFileError`."""
    from hocket.graph.formats.pipedream import graph_from_pipedream, is_pipedream

    where = str(path)
    data = read_bounded(
        path, MAX_FILE_BYTES, lambda head: looks_like_json(head) or is_pipedream(head), _FORMATS
    )
    with fields.located(where):
        if not looks_like_json(data):
            return _not_empty(graph_from_pipedream(data, _name(path)))
        return _not_empty(_graph_from_json(parse_json(data, where), _name(path)))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write hocket.graph/1 atomically, gzipped if the name ends in ``.gz``.

    Equal graphs give identical bytes.
    """
    data = dump_json(graph_to_dict(graph))
    if str(path).endswith(".gz"):
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    write_atomically(path, data)


def _graph_from_json(value: object, name: str) -> Graph:
    from hocket.graph.formats.dnn_partitioning import (
        graph_from_dnn_partitioning,
        is_dnn_partitioning,
    )

    if not isinstance(value, dict):
        raise InputFileError("the file is a list", hint=f"expected {_FORMATS}")
    if "schema" in value:
        if str(value["schema"]).startswith("hocket.plan/"):
            # A likely mistake: both are files that hocket writes.
            raise InputFileError(
                "the file is a plan, not a graph",
                hint="give the model or the graph that was planned",
            )
        return graph_from_dict(value, "")
    if is_dnn_partitioning(value):
        return graph_from_dnn_partitioning(value, name)
    raise InputFileError(
        "the file is JSON but no graph: it has no key 'schema'", hint=f"expected {_FORMATS}"
    )


def _not_empty(graph: Graph) -> Graph:
    if not graph.num_ops:
        raise InputFileError("the graph has no ops", hint="a graph needs at least one op")
    return graph


def _name(path: str | Path) -> str:
    """Name of a graph whose format has none: the file's, or its folder's for ``graph.txt``."""
    file = Path(path)
    stem = file.name.split(".")[0]
    name = file.absolute().parent.name if stem == "graph" else stem
    return "".join(c if c.isprintable() else "?" for c in name)
