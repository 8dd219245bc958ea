"""Reader of the JSON graphs of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020).

A node states its time on an accelerator and on a CPU, and the bytes it occupies, output included;
an edge states the time to transfer the output of its source over a link. Times are read as
milliseconds. O(nodes + edges).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.graph.build import GraphBuilder
from hocket.graph.columns import MAX_BYTES
from hocket.graph.graph import ANY_KIND, CPU_KIND, Graph, Phase, Role, StatedTimes
from hocket.graph.verify import MAX_SECONDS

FORMAT = "dnn-partitioning"

_MAX_ID = 2**31 - 1
_MAX_MS = MAX_SECONDS * 1e3


class _DnnNode(NamedTuple):
    id: int
    name: str
    on_accelerator: bool
    accelerator_s: float
    cpu_s: float
    is_backward: bool
    color: int
    """Nodes with the same color share a device; -1 if free."""
    size_bytes: int


def is_dnn_partitioning(data: dict[str, Any]) -> bool:
    """True if a parsed JSON object looks like this format."""
    return "nodes" in data and "edges" in data and "maxFPGAs" in data


def graph_from_dnn_partitioning(data: object, name: str) -> Graph:
    """Convert a parsed file into a graph.

    A node becomes an op ``name#id`` and, if it has a size, a parameter that it reads. Its output is
    an alias of that parameter, because the size of the node already contains the output.
    """
    file = fields.record(
        data, "the file", required=("maxSizePerFPGA", "maxFPGAs", "maxCPUs", "nodes", "edges")
    )
    nodes = _nodes(file["nodes"])
    builder, memory_of = _with_nodes(nodes, name)
    op_of = {node.id: op for op, node in enumerate(nodes)}
    tensor_s = _add_edges(builder, file["edges"], op_of, memory_of)
    accelerator_s = np.array([n.accelerator_s if n.on_accelerator else np.inf for n in nodes])
    stated = StatedTimes(
        {ANY_KIND: accelerator_s, CPU_KIND: np.array([node.cpu_s for node in nodes])},
        np.array(tensor_s),
    )
    memory_bytes = fields.number(file["maxSizePerFPGA"], "maxSizePerFPGA", 0, MAX_BYTES)
    cluster = {
        "accelerators": fields.integer(file["maxFPGAs"], "maxFPGAs", 0, 1_000_000),
        "accelerator_memory_bytes": round(memory_bytes),
        "cpus": fields.integer(file["maxCPUs"], "maxCPUs", 0, 1_000_000),
    }
    return builder.build(stated=stated, meta={"format": FORMAT, "cluster": cluster})


def on_file_terms(graph: Graph) -> Graph:
    """Return the graph under the memory model of its file, which counts only the sizes of nodes."""
    transient = graph.tensor_role == Role.ACTIVATION
    return replace(graph, tensor_bytes=np.where(transient, 0, graph.tensor_bytes))


def _nodes(value: object) -> list[_DnnNode]:
    nodes: list[_DnnNode] = []
    seen: set[int] = set()
    for index, item in enumerate(fields.items(value, "nodes")):
        node = _node(item, f"nodes[{index}]")
        if node.id in seen:
            raise InputFileError(f"two nodes have the id {node.id}", hint="ids must differ")
        seen.add(node.id)
        nodes.append(node)
    return nodes


def _node(value: object, path: str) -> _DnnNode:
    node = fields.record(
        value,
        path,
        required=("id", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode", "size"),
        optional=("colorClass", "name", "layerId"),
    )
    # Checked only for its type, because the graph has no use for it.
    if "layerId" in node:
        fields.integer(node["layerId"], f"{path}.layerId", -1, _MAX_ID)
    color = node.get("colorClass")
    return _DnnNode(
        id=fields.integer(node["id"], f"{path}.id", 0, _MAX_ID),
        name=fields.text(node.get("name", ""), f"{path}.name") or "node",
        on_accelerator=fields.flag_or_bit(node["supportedOnFpga"], f"{path}.supportedOnFpga"),
        accelerator_s=_seconds(node["fpgaLatency"], f"{path}.fpgaLatency"),
        cpu_s=_seconds(node["cpuLatency"], f"{path}.cpuLatency"),
        is_backward=fields.flag_or_bit(node["isBackwardNode"], f"{path}.isBackwardNode"),
        color=-1 if color is None else fields.integer(color, f"{path}.colorClass", 0, _MAX_ID),
        size_bytes=round(fields.number(node["size"], f"{path}.size", 0, MAX_BYTES)),
    )


def _seconds(value: object, path: str) -> float:
    return fields.number(value, path, 0, _MAX_MS) / 1e3


def _with_nodes(nodes: list[_DnnNode], name: str) -> tuple[GraphBuilder, dict[int, int]]:
    """Return the ops, and by op the tensor that stands for its memory."""
    builder, memory_of = GraphBuilder(name), dict[int, int]()
    color_size = Counter(node.color for node in nodes if node.color >= 0)
    forward_of = _first_forward(nodes)
    for node in nodes:
        op = builder.op(
            f"{node.name}#{node.id}",
            phase=Phase.BACKWARD if node.is_backward else Phase.FORWARD,
            partner=forward_of.get(node.color, -1) if node.is_backward else -1,
            # A color with one node ties nothing.
            group=node.color if color_size[node.color] > 1 else -1,
        )
        if node.size_bytes:
            label = f"memory of {node.name}#{node.id}"
            memory_of[op] = builder.tensor(label, node.size_bytes, role=Role.PARAMETER)
            builder.read(op, memory_of[op])
    return builder, memory_of


def _add_edges(
    builder: GraphBuilder, edges: object, op_of: dict[int, int], memory_of: dict[int, int]
) -> list[float]:
    """Add the output of each node that has a reader; returns the transfer seconds per tensor."""
    output_of, tensor_s = dict[int, int](), [0.0] * len(builder.tensors)
    for index, item in enumerate(fields.items(edges, "edges")):
        path = f"edges[{index}]"
        edge = fields.record(
            item, path, required=("sourceId", "destId", "cost"), optional=("size",)
        )
        src = _known_op(edge["sourceId"], f"{path}.sourceId", op_of)
        dst = _known_op(edge["destId"], f"{path}.destId", op_of)
        size_bytes = round(fields.number(edge.get("size", 0), f"{path}.size", 0, MAX_BYTES))
        link_s = _seconds(edge["cost"], f"{path}.cost")
        if src not in output_of:
            # The size of a node includes its output, which therefore shares the node's memory.
            label = f"output of {builder.ops[src]['name']}"
            output_of[src] = builder.tensor(label, 0, producer=src, alias_of=memory_of.get(src, -1))
            tensor_s.append(0.0)
        # The files repeat the output of a node on each of its edges, so the largest size and time
        # count.
        output = output_of[src]
        made = builder.tensors[output]
        made["bytes"] = max(made["bytes"], size_bytes)
        tensor_s[output] = max(tensor_s[output], link_s)
        builder.read(dst, output)
    return tensor_s


def _known_op(value: object, path: str, op_of: dict[int, int]) -> int:
    node_id = fields.integer(value, path, 0, _MAX_ID)
    if node_id not in op_of:
        raise InputFileError(
            f"{path} is {node_id}, which no node has", hint="edges join the ids of nodes"
        )
    return op_of[node_id]


def _first_forward(nodes: list[_DnnNode]) -> dict[int, int]:
    """First forward op of each color; files with coarse nodes have exactly one."""
    forward: dict[int, int] = {}
    for op, node in enumerate(nodes):
        if node.color >= 0 and not node.is_backward:
            forward.setdefault(node.color, op)
    return forward
