"""Reader of step graphs in the format memgraph-v1, where such files are found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from hocket.base.arrays import pointers
from hocket.graph import Graph, GraphBuilder, OpColumns, Role, TensorColumns, assemble


def read_step_graph(path: Path) -> tuple[Graph, dict[str, float]]:
    """The graph of such a file, and the values that it states for comparison, in MiB."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    return graph_of_data(data), data["reference"]


def graph_of_data(data: dict[str, Any]) -> Graph:
    """One tensor per storage, and a control tensor for every op that another waits for."""
    nodes, sizes = data["nodes"], data["storage_bytes"]
    donated = data.get("donated_outputs", False)
    outputs, inputs = set(data["output_storages"]), set(data["input_storages"])
    producer = [-1] * len(sizes)
    for index, node in enumerate(nodes):
        for storage in node[3]:
            producer[storage] = index
    role = [Role.BUFFER if producer[s] < 0 else Role.ACTIVATION for s in range(len(sizes))]
    size = list(sizes)
    for storage in outputs:
        if producer[storage] >= 0:
            role[storage] = Role.OUTPUT
            size[storage] = 0 if donated else size[storage]
    assert all(producer[s] < 0 for s in inputs)
    waited = sorted({dep for node in nodes for dep in node[1]})
    control = {op: len(sizes) + n for n, op in enumerate(waited)}
    reads = [sorted({*node[2], *(control[dep] for dep in node[1])}) for node in nodes]
    tensors = TensorColumns(
        name=[f"s{s}" for s in range(len(sizes))] + [f"c{op}" for op in waited],
        bytes=size + [0] * len(waited),
        producer=producer + waited,
        role=[*role, *[Role.CONTROL] * len(waited)],
    )
    names = [f"{data['ops'][node[0]]}:{i}" for i, node in enumerate(nodes)]
    ops = OpColumns(
        name=names, kind=[data["ops"][node[0]] for node in nodes],
        flops=[float(node[4]) for node in nodes], bytes_touched=[node[5] for node in nodes],
    )  # fmt: skip
    flat = [tensor for row in reads for tensor in row]
    return assemble(data["name"], ops, tensors, pointers([len(r) for r in reads]), flat)


def olla(folder: Path) -> dict[str, Any]:
    """Small graphs and packing cases with their published optima."""
    return json.loads((folder / "olla_tiny_graphs.json").read_text())


def graph_of_edges(name: str, edges: list[Any]) -> Graph:
    """A graph of tensors between named ops, each (source, sinks, bytes)."""
    builder = GraphBuilder(name)
    names = list(dict.fromkeys(n for source, sinks, _ in edges for n in (source, *sinks)))
    number = {op: builder.op(op) for op in names}
    for index, (source, sinks, size) in enumerate(edges):
        role = Role.ACTIVATION if size else Role.CONTROL
        tensor = builder.tensor(f"{source}.{index}", size, producer=number[source], role=role)
        for sink in sinks:
            builder.read(number[sink], tensor)
    return builder.build()
