"""memgraph-v1: training steps as nodes that read and create storages, for memory scheduling.

A storage becomes a tensor. A dependency that no storage explains (a write after a read, the order
of random numbers) becomes a control tensor of the node that must come first. O(nodes + reads).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.graph.build import GraphBuilder
from hocket.graph.graph import Graph, Role
from hocket.graph.verify import MAX_BYTES, MAX_FLOPS

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
    """Whether a parsed JSON object looks like this format."""
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
