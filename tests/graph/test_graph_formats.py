"""Readers of public formats: small files by hand, and every file of the shared data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hocket.base.errors import InputFileError
from hocket.graph import Graph, Phase, Role, read_graph
from hocket.graph.formats.dnn_partitioning import on_file_terms

DATA = Path(__file__).parents[3] / "shared" / "data"
DNN_FILES = sorted((DATA / "placement/dnn-partitioning").glob("*-inputs/*/*.json"))
PIPEDREAM_FILES = [
    *sorted((DATA / "placement/pipedream/profiler").glob("*/profiles/*/graph.txt")),
    *sorted((DATA / "placement/pipedream/graph/test_graphs").glob("*.txt")),
]


def shared(files: list[Path]) -> pytest.MarkDecorator:
    """One case per file of the shared data, or one that is skipped where the data is not there."""
    if files:
        ids = [str(file.relative_to(DATA)) for file in files]
        return pytest.mark.parametrize("file", files, ids=ids)
    missing = pytest.param(None, marks=pytest.mark.skip(reason=f"no data under {DATA}"))
    return pytest.mark.parametrize("file", [missing])


def named(graph: Graph, name: str) -> int:
    return graph.op_names.index(name)


def tensor(graph: Graph, name: str) -> int:
    return graph.tensor_names.index(name)


# ── dnn-partitioning ─────────────────────────────────────────────────────────────────────────────


def dnn_node(node_id: int, **more: object) -> dict:
    node = {"id": node_id, "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 3.0,
            "isBackwardNode": False, "size": 0.0}  # fmt: skip
    return {**node, **more}


def dnn_file(**more: object) -> dict:
    nodes = [
        dnn_node(7, name="back", isBackwardNode=1, colorClass=4, fpgaLatency=5),
        dnn_node(3, name="fore", colorClass=4, size=100.0),
        dnn_node(5, name="host only", colorClass=9, supportedOnFpga=False),
    ]
    edges = [
        {"sourceId": 3, "destId": 7, "cost": 2.0, "size": 40.0},
        {"sourceId": 3, "destId": 5, "cost": 2.0, "size": 64.4},
        {"sourceId": 5, "destId": 7, "cost": 1.0},
    ]
    file = {"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    return {**file, **more}


def read(tmp_path: Path, content: object) -> Graph:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "file").write_text(text)
    return read_graph(tmp_path / "file")


def test_dnn_partitioning_nodes_become_ops_with_stated_times(tmp_path):
    graph = read(tmp_path, dnn_file())
    assert graph.op_names == ("fore#3", "host only#5", "back#7")
    assert graph.stated is not None
    assert graph.stated.op_s["*"].tolist() == [0.003, np.inf, 0.005]
    assert graph.stated.op_s["cpu"].tolist() == [0.009] * 3
    assert graph.op_phase.tolist() == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]
    assert graph.partner.tolist() == [-1, -1, 0]
    assert graph.group.tolist() == [4, -1, 4]
    assert graph.meta["cluster"] == {
        "accelerators": 2,
        "accelerator_memory_bytes": 10**9,
        "cpus": 1,
    }
    assert graph.meta["format"] == "dnn-partitioning"


def test_dnn_partitioning_output_is_inside_the_size_of_its_node(tmp_path):
    graph = read(tmp_path, dnn_file())
    output, memory = tensor(graph, "output of fore#3"), tensor(graph, "memory of fore#3")
    assert graph.tensor_bytes[output] == 64
    assert graph.alias_of[output] == memory
    assert graph.held_bytes.sum() == 100
    assert [graph.op_names[op] for op in graph.users_of(output)] == ["host only#5", "back#7"]
    assert graph.stated is not None
    assert graph.stated.tensor_s is not None
    assert graph.stated.tensor_s[output] == 0.002
    assert graph.stated.tensor_s[memory] == 0


def test_on_file_terms_counts_only_the_sizes_of_nodes(tmp_path):
    graph = read(tmp_path, dnn_file())
    plain = on_file_terms(graph)
    assert plain.tensor_bytes[tensor(graph, "output of host only#5")] == 0
    assert plain.tensor_bytes.sum() == 100
    assert plain.edges[0].tolist() == graph.edges[0].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [dnn_node(1), dnn_node(1)]}, "two nodes have the id 1"),
        ({"nodes": [dnn_node(1, size=-1)]}, "nodes[0].size is -1"),
        ({"nodes": [dnn_node(1, size=float("nan"))]}, "NaN"),
        ({"nodes": [dnn_node(1, fpgaLatency="3")]}, "nodes[0].fpgaLatency is '3'"),
        ({"nodes": [dnn_node(1, supportedOnFpga=2)]}, "nodes[0].supportedOnFpga is 2"),
        ({"nodes": [dnn_node(1, weight=2)]}, "unknown key 'weight' in nodes[0]"),
        ({"nodes": [{"id": 1}]}, "nodes[0] has no key 'supportedOnFpga'"),
        ({"edges": [{"sourceId": 3, "destId": 99, "cost": 0}]}, "edges[0].destId is 99"),
        ({"edges": [{"sourceId": 3, "destId": 3, "cost": 0}]}, "'fore#3' depends on itself"),
        ({"maxFPGAs": 1.5}, "maxFPGAs is 1.5"),
        ({"nodes": [], "edges": []}, "no ops"),
        ({"extra": 1}, "unknown key 'extra'"),
    ],
)
def test_dnn_partitioning_refuses(tmp_path, change, message):
    with pytest.raises(InputFileError) as caught:
        read(tmp_path, dnn_file(**change))
    assert message in caught.value.message
    assert caught.value.hint
    assert caught.value.where == str(tmp_path / "file")


@shared(DNN_FILES)
def test_dnn_partitioning_public_file_loads_whole(file):
    content = json.loads(file.read_text())
    graph = read_graph(file)
    nodes = content["nodes"]
    assert graph.num_ops == len(nodes)
    op_of = {node["id"]: named(graph, f"{node['name']}#{node['id']}") for node in nodes}
    edges = set(zip(*(end.tolist() for end in graph.edges), strict=True))
    assert edges == {(op_of[e["sourceId"]], op_of[e["destId"]]) for e in content["edges"]}
    assert on_file_terms(graph).tensor_bytes.sum() == sum(round(n["size"]) for n in nodes)
    assert graph.stated is not None
    total_ms = sum(node["fpgaLatency"] for node in nodes)
    assert graph.stated.op_s["*"].sum() * 1e3 == pytest.approx(total_ms)
    for node in nodes:
        op = op_of[node["id"]]
        assert (graph.op_phase[op] == Phase.BACKWARD) == bool(node["isBackwardNode"])
        if graph.partner[op] >= 0:
            assert graph.group[graph.partner[op]] == graph.group[op] == node["colorClass"]


# ── PipeDream ────────────────────────────────────────────────────────────────────────────────────

PIPEDREAM = """\
node2 -- LSTM(4, 4) -- forward_compute_time=2.000, backward_compute_time=4.000, \
activation_size=[100.0; 20.0], parameter_size=50.000 -- stage_id=0
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=10.0, parameter_size=0.000 -- stage_id=0
node3 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=20.0, parameter_size=0.000 -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3"""


def test_pipedream_layer_becomes_a_forward_and_a_mirrored_backward_op(tmp_path):
    graph = read(tmp_path, PIPEDREAM)
    assert graph.op_names == (
        "node1", "node2", "node3", "node3.backward", "node2.backward", "node1.backward",
    )  # fmt: skip
    for op, name in enumerate(graph.op_names):
        forward = name.removesuffix(".backward")
        assert graph.module_of(op) == forward
        expected = named(graph, forward) if name != forward else -1
        assert graph.partner[op] == expected
    assert graph.stated is not None
    assert graph.stated.op_s["*"].tolist() == [0, 0.002, 0, 0, 0.004, 0]
    assert graph.kind_of(1) == "LSTM"


def test_pipedream_tensors_flow_forth_and_gradients_back(tmp_path):
    graph = read(tmp_path, PIPEDREAM)
    sizes = dict(zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True))
    assert sizes == {
        "node2.parameter": 50,
        "node2.parameter.gradient": 50,
        "node1.output": 10,
        "node2.output.0": 100,
        "node2.output.1": 20,
        "node3.output": 20,
        "node2.gradient for node1": 10,
        "node3.gradient for node2": 20,
    }

    def users(name: str) -> list[str]:
        return [graph.op_names[op] for op in graph.users_of(tensor(graph, name))]

    assert users("node1.output") == ["node2", "node1.backward"]
    assert users("node2.output.0") == ["node2.backward"]
    assert users("node2.output.1") == ["node3", "node2.backward"]
    assert users("node2.parameter") == ["node2", "node2.backward"]
    assert users("node3.gradient for node2") == ["node2.backward"]
    assert graph.alias_of[tensor(graph, "node3.output")] == tensor(graph, "node2.output.1")
    assert graph.tensor_role[tensor(graph, "node2.parameter.gradient")] == Role.GRADIENT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("node2 -- node3", "node2 -- node33", "line 5 names an unknown node 'node33'"),
        ("\tnode1 -- node2", "\tnode1", "line 4 is"),
        ("parameter_size=50.000", "parameter_size=-5", "line 1 has the value '-5'"),
        ("parameter_size=50.000", "parameter_size=nan", "line 1 has the value 'nan'"),
        ("parameter_size=50.000", "parameter_size=1e99", "line 1 has the value '1e99'"),
        ("parameter_size=50.000", "parameter=50", "line 1 is"),
        (", parameter_size=50.000", "", "line 1 is"),
        ("[100.0; 20.0]", "[100.0, 20.0]", "line 1 is"),
        ("[100.0; 20.0]", "[]", "line 1 has the value ''"),
        ("stage_id=1", "stage=1", "line 3 is"),
        ("node3 -- __", "node2 -- __", "line 3 repeats the node 'node2'"),
        ("node2 -- node3", "node2 -- node1", "depends on itself through a cycle"),
        ("node1 -- Input0", "no\x07de1 -- Input0", "unknown node"),
    ],
)
def test_pipedream_refuses(tmp_path, old, new, message):
    with pytest.raises(InputFileError) as caught:
        read(tmp_path, PIPEDREAM.replace(old, new))
    assert message in caught.value.message
    assert caught.value.hint
    assert caught.value.where == str(tmp_path / "file")


@shared(PIPEDREAM_FILES)
def test_pipedream_public_file_loads_whole(file):
    text = file.read_text()
    lines = text.splitlines()
    layers = [line for line in lines if line and not line.startswith("\t")]
    edges = {tuple(line.split(" -- ")) for line in map(str.strip, lines) if line.count(" -- ") == 1}
    graph = read_graph(file)
    assert graph.num_ops == 2 * len(layers)
    found = {
        (graph.op_names[src], graph.op_names[dst])
        for src, dst in zip(*(end.tolist() for end in graph.edges), strict=True)
    }
    backward = {(f"{b}.backward", f"{a}.backward") for a, b in edges}
    own = {(line.split(" -- ")[0], line.split(" -- ")[0] + ".backward") for line in layers}
    assert found == edges | backward | own
