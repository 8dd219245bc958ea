"""Read graph files of any known format; write hocket.graph/1.

Formats are recognised by content, never by name, and each may be gzipped: hocket.graph/1, the JSON
of dnn-partitioning, and PipeDream's ``graph.txt``. Other files are rejected after their first 64
KiB.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hocket.base import fields
from hocket.base.arrays import FloatArray, LongArray
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError
from hocket.base.fields import located
from hocket.base.jsonfile import dump_json, looks_like_json, parse_json, read_bounded
from hocket.graph.graph import DTYPES, Graph, OtherBatch, Phase, Role, StatedTimes, Stream
from hocket.graph.verify import MAX_BYTES, MAX_FLOPS, MAX_SECONDS, verify_graph

__all__ = ["graph_from_dict", "graph_to_dict", "read_graph", "write_graph"]


# hocket.graph/1: the own file format, one list per column of the Graph.
#
# The file is the Graph as it is: ops in topological order, tensors in the order of their producers.
# Columns whose entries are all the default are left out. O(ops + reads) in numpy and the JSON
# parser, so that a million ops take seconds.

GRAPH_SCHEMA = "hocket.graph/1"

_MAX_INDEX = 2**31 - 1
_LENGTHS = "every column has one entry per op or per tensor, or is left out"


class _Column(NamedTuple):
    """An integer column: key in the file, field of the Graph, allowed values, default."""

    key: str
    field: str
    dtype: type[np.signedinteger[Any]]
    low: int
    high: int
    default: int | None
    """None if the column is required."""


_OP_COLUMNS = (
    _Column("kind", "op_kind", np.int32, 0, _MAX_INDEX, None),
    _Column("module", "op_module", np.int32, -1, _MAX_INDEX, -1),
    _Column("signature", "op_signature", np.int32, -1, _MAX_INDEX, -1),
    _Column("phase", "op_phase", np.int8, 0, len(Phase) - 1, Phase.FORWARD),
    _Column("dtype", "op_dtype", np.int8, 0, len(DTYPES) - 1, 0),
    _Column("bytes_touched", "bytes_touched", np.int64, 0, MAX_BYTES, 0),
    _Column("workspace_bytes", "workspace_bytes", np.int64, 0, MAX_BYTES, 0),
    _Column("partner", "partner", np.int32, -1, _MAX_INDEX, -1),
    _Column("group", "group", np.int32, -1, _MAX_INDEX, -1),
    _Column("rng_order", "rng_order", np.int32, -1, _MAX_INDEX, -1),
    _Column("stream", "op_stream", np.int8, 0, len(Stream) - 1, Stream.COMPUTE),
)
_TENSOR_COLUMNS = (
    _Column("bytes", "tensor_bytes", np.int64, 0, MAX_BYTES, None),
    _Column("producer", "tensor_producer", np.int32, -1, _MAX_INDEX, None),
    _Column("role", "tensor_role", np.int8, 0, len(Role) - 1, Role.ACTIVATION),
    _Column("alias_of", "alias_of", np.int32, -1, _MAX_INDEX, -1),
)


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """Return the graph as plain JSON values in the layout of hocket.graph/1."""
    ops = {"name": list(graph.op_names), **_written(graph, _OP_COLUMNS)}
    if np.any(graph.flops):
        ops["flops"] = graph.flops.tolist()
    other = {} if graph.other_batch is None else {"other_batch": _other_data(graph.other_batch)}
    return {
        "schema": GRAPH_SCHEMA,
        "name": graph.name,
        "meta": dict(graph.meta),
        "kinds": list(graph.kinds),
        "modules": list(graph.modules),
        "signatures": list(graph.signatures),
        "ops": ops,
        "tensors": {"name": list(graph.tensor_names), **_written(graph, _TENSOR_COLUMNS)},
        "reads": {"ptr": graph.read_ptr.tolist(), "tensor": graph.reads.tolist()},
        "stated": _stated_to_dict(graph.stated),
        **other,
    }


def graph_from_dict(data: object, where: str) -> Graph:
    """Return the verified graph of a parsed hocket.graph/1 file; ``where`` names it in errors."""
    with fields.located(where):
        return _graph_from_dict(data)


def _written(graph: Graph, columns: tuple[_Column, ...]) -> dict[str, list[Any]]:
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
        optional=("flops", *(column.key for column in _OP_COLUMNS)),
    )
    tensors = fields.record(
        file["tensors"],
        "tensors",
        required=("name", "bytes", "producer"),
        optional=tuple(column.key for column in _TENSOR_COLUMNS),
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
        flops=_flops(ops.get("flops"), len(op_names)),
        **_read(ops, "ops", _OP_COLUMNS, len(op_names)),
        tensor_names=tuple(tensor_names),
        **_read(tensors, "tensors", _TENSOR_COLUMNS, len(tensor_names)),
        read_ptr=_ints(reads["ptr"], "reads.ptr", 0, _MAX_INDEX, len(op_names) + 1),
        reads=fields.int_column(reads["tensor"], "reads.tensor", 0, _MAX_INDEX).astype(np.int32),
        stated=_stated(file.get("stated"), len(op_names), len(tensor_names)),
        other_batch=_other_batch(file.get("other_batch"), len(op_names), len(tensor_names)),
        meta=dict(fields.mapping(file.get("meta", {}), "meta")),
    )
    verify_graph(graph)
    return graph


def _other_data(other: OtherBatch) -> dict[str, Any]:
    columns = ("flops", "bytes_touched", "workspace_bytes", "tensor_bytes")
    return {
        "samples": other.num_samples,
        "other_samples": other.other_samples,
        "signatures": list(other.signatures),
        "signature": other.op_signature.tolist(),
        **{name: getattr(other, name).tolist() for name in columns},
    }


def _other_batch(value: object, num_ops: int, num_tensors: int) -> OtherBatch | None:
    if value is None:
        return None
    path = "other_batch"
    columns = ("flops", "bytes_touched", "workspace_bytes", "tensor_bytes")
    entry = fields.record(
        value, path, required=("samples", "other_samples", "signatures", "signature", *columns)
    )
    num_samples = fields.integer(entry["samples"], f"{path}.samples", 1, _MAX_INDEX)
    other_samples = fields.integer(entry["other_samples"], f"{path}.other_samples", 1, _MAX_INDEX)
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
    section: Mapping[str, Any], path: str, columns: tuple[_Column, ...], length: int
) -> dict[str, Any]:
    return {
        column.field: _ints(
            section[column.key], f"{path}.{column.key}", column.low, column.high, length
        ).astype(column.dtype)
        if column.key in section
        else np.full(length, column.default, dtype=column.dtype)
        for column in columns
    }


def _flops(value: object, length: int) -> FloatArray:
    if value is None:
        return np.zeros(length)
    return _floats(value, "ops.flops", MAX_FLOPS, length)


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
    with located(where):
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
