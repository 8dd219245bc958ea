"""Properties of building: order, relations and hash, against brute force and networkx."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import networkx as nx
import numpy as np
import pytest
from graph.random_graphs import PlainGraph, plain_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.graph import (
    Graph,
    GraphBuilder,
    OpColumns,
    Role,
    StatedTimes,
    TensorColumns,
    assemble,
    generate,
    verify_graph,
)

FAST = settings(derandomize=True, deadline=None, max_examples=150)


@FAST
@given(plain_graphs(), st.randoms(use_true_random=False))
def test_builder_puts_shuffled_ops_into_a_topological_order(plain: PlainGraph, random):
    order = list(range(len(plain.reads)))
    random.shuffle(order)
    graph = plain.build(order)
    place = {name: index for index, name in enumerate(graph.op_names)}
    assert sorted(place) == sorted(f"op{op}" for op in order)
    assert all(place[src] < place[dst] for src, dst in plain.edges())
    for op, name in enumerate(f"op{op}" for op in range(len(order))):
        index = place[name]
        assert graph.op_phase[index] == plain.phases[op]
        assert {graph.tensor_names[t] for t in graph.reads_of(index)} == {
            f"t{t}" for t in plain.reads[op]
        }
    for t, (producer, size, role, alias) in enumerate(plain.tensors):
        index = graph.tensor_names.index(f"t{t}")
        made_by = int(graph.tensor_producer[index])
        assert (graph.op_names[made_by] if made_by >= 0 else "op-1") == f"op{producer}"
        assert (graph.tensor_bytes[index], graph.tensor_role[index]) == (size, role)
        base = int(graph.alias_of[index])
        assert (graph.tensor_names[base] if base >= 0 else "t-1") == f"t{alias}"


@FAST
@given(plain_graphs(), st.data())
def test_builder_keeps_an_order_that_is_already_topological(plain: PlainGraph, data):
    graph = plain.build(list(range(len(plain.reads))))
    assert graph.op_names == tuple(f"op{op}" for op in range(len(plain.reads)))
    again = plain.build(list(range(len(plain.reads))))
    assert again.content_hash == graph.content_hash


@FAST
@given(plain_graphs(), st.data())
def test_builder_refuses_exactly_what_networkx_calls_cyclic(plain: PlainGraph, data):
    made = [t for t, tensor in enumerate(plain.tensors) if tensor[0] >= 0]
    ops = range(len(plain.reads))
    pairs = st.tuples(st.sampled_from(ops), st.sampled_from(made or [0]))
    extra = data.draw(st.lists(pairs, max_size=3)) if made else []
    reference = nx.DiGraph(plain.edges())
    reference.add_edges_from((f"op{plain.tensors[t][0]}", f"op{op}") for op, t in extra)
    order = data.draw(st.permutations(ops))
    if nx.is_directed_acyclic_graph(reference):
        plain.build(order, extra)
        return
    with pytest.raises(InputFileError, match="depends on itself through a cycle") as caught:
        plain.build(order, extra)
    stuck = caught.value.message.split("'")[1]
    upstream = nx.ancestors(reference, stuck) | {stuck}
    assert not nx.is_directed_acyclic_graph(reference.subgraph(upstream))


@FAST
@given(plain_graphs(), st.randoms(use_true_random=False))
def test_graph_relations_equal_brute_force(plain: PlainGraph, random):
    order = list(range(len(plain.reads)))
    random.shuffle(order)
    graph = plain.build(order)
    reads = [list(graph.reads_of(op)) for op in range(graph.num_ops)]
    assert all(r == sorted(set(r)) for r in reads)
    for tensor in range(graph.num_tensors):
        users = [op for op in range(graph.num_ops) if tensor in reads[op]]
        assert list(graph.users_of(tensor)) == users
    for op in range(graph.num_ops):
        made = [t for t in range(graph.num_tensors) if graph.tensor_producer[t] == op]
        assert list(graph.made_by(op)) == made
    src, dst = graph.edges
    expected = {
        (int(dst_op), int(graph.tensor_producer[t]))
        for dst_op in range(graph.num_ops)
        for t in reads[dst_op]
        if graph.tensor_producer[t] >= 0
    }
    assert list(zip(dst.tolist(), src.tolist(), strict=True)) == sorted(expected)
    owners = [t for t in range(graph.num_tensors) if graph.alias_of[t] < 0]
    assert graph.held_bytes.sum() == sum(int(graph.tensor_bytes[t]) for t in owners)


def test_graph_without_tensors_has_empty_relations():
    builder = GraphBuilder("lonely")
    builder.op("a")
    graph = builder.build()
    assert (len(graph.users), len(graph.edges[0]), list(graph.made_by(0))) == (0, 0, [])


def test_assemble_refuses_columns_of_the_wrong_length():
    ops = OpColumns(name=["a"], kind=["k"], flops=[1.0, 2.0])
    with pytest.raises(InputFileError, match="2 entries, expected 1"):
        assemble("g", ops, TensorColumns([], [], []), [0, 0], [])


def test_assemble_refuses_ids_that_point_nowhere():
    ops = OpColumns(name=["a"], kind=["k"])
    for tensors, ptr, reads in (
        (TensorColumns(["t"], [1], [7]), [0, 0], []),
        (TensorColumns(["t"], [1], [0]), [0, 1], [3]),
        (TensorColumns(["t"], [1], [0], alias_of=[5]), [0, 0], []),
    ):
        with pytest.raises(InputFileError, match="does not exist") as caught:
            assemble("g", ops, tensors, ptr, reads)
        assert caught.value.hint


# ── the content hash ─────────────────────────────────────────────────────────────────────────────


def _stated_graph() -> Graph:
    graph = generate("transformer", 43, 3)
    stated = StatedTimes(
        {"*": np.linspace(0, 1, graph.num_ops), "cpu": np.ones(graph.num_ops)},
        np.linspace(0, 1, graph.num_tensors),
    )
    return replace(graph, stated=stated, signatures=("s",), op_signature=graph.partner * 0)


@pytest.mark.parametrize(
    "field",
    [f.name for f in fields(Graph) if f.name not in ("name", "meta", "stated", "other_batch")],
)
def test_content_hash_changes_with_every_field(field):
    graph = _stated_graph()
    value = getattr(graph, field)
    if isinstance(value, tuple):
        changed = (*value[:-1], value[-1] + "x")
    else:
        changed = value.copy()
        changed[-1] += 1
    assert replace(graph, **{field: changed}).content_hash != graph.content_hash


def test_content_hash_changes_with_stated_times_but_not_with_name_and_meta():
    graph = _stated_graph()
    assert graph.stated is not None
    op_s, tensor_s = dict(graph.stated.op_s), graph.stated.tensor_s
    variants = [
        StatedTimes({**op_s, "*": op_s["*"] + 1e-12}, tensor_s),
        StatedTimes({**op_s, "cpu": op_s["cpu"] * 2}, tensor_s),
        StatedTimes({"*": op_s["*"]}, tensor_s),
        StatedTimes(op_s, None),
        None,
    ]
    hashes = {replace(graph, stated=stated).content_hash for stated in variants}
    assert len(hashes | {graph.content_hash}) == len(variants) + 1
    renamed = replace(graph, name="other", meta={"more": 1})
    assert renamed.content_hash == graph.content_hash


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_content_hash_is_equal_across_processes(hash_seed):
    code = "from hocket.graph import generate; print(generate('gnmt', 300, 5).content_hash)"
    env = {"PYTHONHASHSEED": hash_seed, "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert out.stdout.strip() == generate("gnmt", 300, 5).content_hash, out.stderr


def test_graph_arrays_cannot_be_written():
    graph = generate("chain", 5)
    for array in (graph.flops, graph.reads, graph.users, graph.edges[0], graph.made_ptr):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_verify_accepts_what_was_built():
    builder = GraphBuilder("aliases before the step")
    weight = builder.tensor("weight", 8, role=Role.PARAMETER)
    builder.tensor("tied", 8, role=Role.PARAMETER, alias_of=weight)
    builder.op("a", reads=[weight])
    verify_graph(builder.build())
