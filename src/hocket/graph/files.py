"""Graph files: which format a file has, and how to read and write it.

Formats are recognised by content, never by name, and each may be gzipped: hocket.graph/1 and
memgraph-v1 JSON, the JSON of dnn-partitioning, and PipeDream's ``graph.txt``. What cannot be one of
them is refused after its first 64 KiB.
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
from hocket.graph.build import GraphBuilder
from hocket.graph.formats.dnn_partitioning import (
    graph_from_dnn_partitioning,
    is_dnn_partitioning,
)
from hocket.graph.formats.pipedream import graph_from_pipedream, is_pipedream
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
    """An integer column: key in the file, field of the Graph, entries allowed, default."""

    key: str
    field: str
    dtype: type[np.signedinteger[Any]]
    low: int
    high: int
    default: int | None
    """None for a column that must be there."""


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
    """The graph as plain JSON values in the layout of hocket.graph/1."""
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
    """The verified graph of a parsed hocket.graph/1 file; ``where`` names it in errors."""
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


# memgraph-v1: training steps as nodes that read and create storages, for memory scheduling.
#
# A storage becomes a tensor. A dependency that no storage explains (a write after a read, the order
# of random numbers) becomes a control tensor of the node that must come first. O(nodes + reads).

FORMAT = "memgraph-v1"

_NODE_FIELDS = [
    "op_index",
    "dep_node_indices",
    "read_storages",
    "created_storages",
    "flops",
    "bytes_touched",
]
_NODE_HINT = f"expected {_NODE_FIELDS}"


class _MemgraphNode(NamedTuple):
    kind: str
    after: list[int]
    """Nodes that come first."""
    reads: list[int]
    creates: list[int]
    flops: float
    bytes_touched: int


def is_memgraph(data: dict[str, Any]) -> bool:
    """True if a parsed JSON object looks like this format."""
    return str(data.get("format", "")).startswith("memgraph")


def graph_from_memgraph(data: object, name: str) -> Graph:
    """The graph of a parsed file; storages that exist before the step become buffers."""
    file = fields.record(
        data,
        "the file",
        required=("format", "ops", "storage_bytes", "input_storages", "output_storages", "nodes"),
        optional=("name", "donated_outputs", "node_fields", "reference"),
    )
    fields.choice(file["format"], "format", (FORMAT,))
    if file.get("node_fields", _NODE_FIELDS) != _NODE_FIELDS:
        raise InputFileError("node_fields is not as expected", hint=_NODE_HINT)
    sizes = fields.int_column(file["storage_bytes"], "storage_bytes", 0, MAX_BYTES).tolist()
    inputs = _indices(file["input_storages"], "input_storages", len(sizes))
    outputs = set(_indices(file["output_storages"], "output_storages", len(sizes)))
    nodes = _nodes(file["nodes"], fields.text_column(file["ops"], "ops"), len(sizes))
    if fields.flag_or_bit(file.get("donated_outputs", False), "donated_outputs"):
        # They are written over tensors that persist, whose bytes are already counted.
        sizes = [0 if s in outputs else size for s, size in enumerate(sizes)]
    builder = GraphBuilder(fields.text(file.get("name", name), "name"))
    for index, node in enumerate(nodes):
        builder.op(
            f"{node.kind}#{index}",
            node.kind,
            reads=node.reads,
            flops=node.flops,
            bytes_touched=node.bytes_touched,
        )
    creator = _creators(nodes, set(inputs), len(sizes))
    _add_storages(builder, sizes, creator, outputs)
    _add_controls(builder, nodes, creator)
    meta: dict[str, Any] = {"format": FORMAT}
    if "reference" in file:
        meta["reference"] = file["reference"]
    return builder.build(meta=meta)


def _indices(value: object, path: str, count: int) -> list[int]:
    # Most nodes have two or three: too few for an array to be worth making.
    if type(value) is list and all(type(i) is int and 0 <= i < count for i in value):
        return value
    indices: list[int] = fields.int_column(value, path, 0, count - 1).tolist()
    return indices


def _nodes(value: object, kinds: list[str], num_storages: int) -> list[_MemgraphNode]:
    nodes = []
    for index, item in enumerate(fields.items(value, "nodes")):
        path = f"nodes[{index}]"
        kind, after, reads, creates, flops, touched = fields.sized(
            item, path, len(_NODE_FIELDS), _NODE_HINT
        )
        nodes.append(
            _MemgraphNode(
                kinds[fields.integer(kind, f"{path}[0]", 0, len(kinds) - 1)],
                _indices(after, f"{path}[1]", index),
                _indices(reads, f"{path}[2]", num_storages),
                _indices(creates, f"{path}[3]", num_storages),
                fields.number(flops, f"{path}[4]", 0, MAX_FLOPS),
                fields.integer(touched, f"{path}[5]", 0, MAX_BYTES),
            )
        )
    return nodes


def _creators(nodes: list[_MemgraphNode], inputs: set[int], num_storages: int) -> list[int]:
    """The node that creates each storage; -1 for those that exist before the step."""
    creator = {storage: -1 for storage in inputs}
    for index, node in enumerate(nodes):
        for storage in node.creates:
            if storage in creator:
                raise InputFileError(
                    f"nodes[{index}] creates storage {storage}, which exists already",
                    hint="a storage is an input or is created by one node",
                )
            creator[storage] = index
    missing = next((s for s in range(num_storages) if s not in creator), None)
    if missing is not None:
        raise InputFileError(
            f"storage {missing} is neither an input nor created by a node",
            hint="add it to input_storages or to the node that creates it",
        )
    return [creator[storage] for storage in range(num_storages)]


def _add_storages(
    builder: GraphBuilder, sizes: list[int], creator: list[int], outputs: set[int]
) -> None:
    for storage, size_bytes in enumerate(sizes):
        if creator[storage] < 0:
            role = Role.BUFFER
        else:
            role = Role.OUTPUT if storage in outputs else Role.ACTIVATION
        builder.tensor(f"storage {storage}", size_bytes, producer=creator[storage], role=role)


def _add_controls(builder: GraphBuilder, nodes: list[_MemgraphNode], creator: list[int]) -> None:
    control: dict[int, int] = {}
    for index, node in enumerate(nodes):
        explained = {creator[storage] for storage in node.reads}
        for earlier in node.after:
            if earlier in explained:
                continue
            if earlier not in control:
                control[earlier] = builder.tensor(
                    f"end of {nodes[earlier].kind}#{earlier}",
                    0,
                    producer=earlier,
                    role=Role.CONTROL,
                )
            builder.read(index, control[earlier])


MAX_FILE_BYTES = 512 * 2**20
"""After decompression; a million ops take about a third of it."""
_GZIP_LEVEL = 3
"""A fifth larger than the default level and three times as fast."""
_FORMATS = (
    f"a graph: {GRAPH_SCHEMA}, dnn-partitioning or memgraph-v1 JSON, or a PipeDream graph.txt"
)


def read_graph(path: str | Path) -> Graph:
    """The verified graph of a file in any known format; raises `InputFileError`."""
    where = str(path)
    data = read_bounded(
        path, MAX_FILE_BYTES, lambda head: looks_like_json(head) or is_pipedream(head), _FORMATS
    )
    with located(where):
        if not looks_like_json(data):
            return _not_empty(graph_from_pipedream(data, _name(path)))
        return _not_empty(_graph_from_json(parse_json(data, where), _name(path)))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write hocket.graph/1 atomically, gzipped where the name ends in ``.gz``.

    Equal graphs give equal bytes.
    """
    data = dump_json(graph_to_dict(graph))
    if str(path).endswith(".gz"):
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    write_atomically(path, data)


def _graph_from_json(value: object, name: str) -> Graph:
    if not isinstance(value, dict):
        raise InputFileError("the file is a list", hint=f"expected {_FORMATS}")
    if "schema" in value:
        if str(value["schema"]).startswith("hocket.plan/"):
            raise InputFileError(
                "the file is a plan, not a graph",
                hint="give the model or the graph that was planned",
            )
        return graph_from_dict(value, "")
    if is_memgraph(value):
        return graph_from_memgraph(value, name)
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
    """A name for graphs whose format has none: the file's, or its folder's for ``graph.txt``."""
    file = Path(path)
    stem = file.name.split(".")[0]
    name = file.absolute().parent.name if stem == "graph" else stem
    return "".join(c if c.isprintable() else "?" for c in name)
