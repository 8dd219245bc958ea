"""Fused graphs: no cycle ever, nothing lost, and at least the memory of the ops inside."""

import networkx as nx
import numpy as np
import pytest
from graph.training_graphs import training_graphs, units_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import joined, problem_of

from hocket.graph import GraphBuilder, Phase, Role, StatedTimes, generate, verify_graph
from hocket.graph.coarsen import co_placed, forward_only, fuse
from hocket.plan.plan import Plan
from hocket.simulate.engine import simulate


@st.composite
def fused(draw):
    graph = draw(training_graphs())
    units = draw(units_of(graph))
    op_s = np.arange(graph.num_ops) % 4.0
    return graph, units, fuse(graph, units, op_s)


def _edges(graph, node_of):
    src, dst = graph.edges
    pairs = zip(node_of[src].tolist(), node_of[dst].tolist(), strict=True)
    return {(a, b) for a, b in pairs if a != b}


@given(fused())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_fused_graph_is_a_legal_graph_without_cycles(case):
    graph, _, coarse = case
    verify_graph(coarse.graph)
    assert sorted(set(coarse.node_of.tolist())) == list(range(coarse.graph.num_ops))
    quotient = nx.DiGraph(_edges(graph, coarse.node_of))
    assert nx.is_directed_acyclic_graph(quotient)


@given(fused())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_the_edges_between_nodes_are_those_between_their_ops(case):
    graph, _, coarse = case
    own = np.arange(coarse.graph.num_ops)
    assert _edges(coarse.graph, own) == _edges(graph, coarse.node_of)


@given(fused())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_nodes_keep_units_and_phases_apart_and_sum_up_work(case):
    graph, units, coarse = case
    for node in range(coarse.graph.num_ops):
        ops = np.flatnonzero(coarse.node_of == node)
        assert len(set(units[ops].tolist())) == 1
        assert set(graph.op_phase[ops].tolist()) == {int(coarse.graph.op_phase[node])}
        assert coarse.graph.flops[node] == graph.flops[ops].sum()
        assert coarse.graph.bytes_touched[node] == graph.bytes_touched[ops].sum()
        drawn = graph.rng_order[ops][graph.rng_order[ops] >= 0]
        assert coarse.graph.rng_order[node] == min(drawn.tolist(), default=-1)
        assert coarse.graph.op_names[node] in {graph.op_names[op] for op in ops}


@given(fused())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_nodes_of_one_unit_are_tied_and_no_others(case):
    _, units, coarse = case
    unit_of_node = {int(n): int(u) for n, u in zip(coarse.node_of, units, strict=True)}
    nodes = range(coarse.graph.num_ops)
    for one in nodes:
        for other in range(one):
            group = coarse.graph.group
            is_tied = bool(group[one] >= 0 and group[one] == group[other])
            assert is_tied == (unit_of_node[one] == unit_of_node[other])


@given(fused())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_what_the_degree_rule_allows_is_fused(case):
    graph, units, coarse = case
    edges = _edges(graph, coarse.node_of)
    phase = coarse.graph.op_phase
    if all(phase[a] <= phase[b] for a, b in edges):
        edges = {(a, b) for a, b in edges if phase[a] == phase[b]}
    unit_of_node = {int(n): int(u) for n, u in zip(coarse.node_of, units, strict=True)}
    for src, dst in edges:
        if unit_of_node[src] == unit_of_node[dst] and phase[src] == phase[dst]:
            assert sum(a == src for a, _ in edges) > 1
            assert sum(b == dst for _, b in edges) > 1


@given(fused())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_on_one_device_a_fused_graph_needs_no_less_memory_than_its_ops(case):
    graph, _, coarse = case
    cluster = joined(1)
    fine = problem_of(graph, cluster, np.ones(graph.num_ops))
    small = problem_of(coarse.graph, cluster, np.ones(coarse.graph.num_ops))
    by_node = Plan().placing(
        np.zeros(graph.num_ops, dtype=np.int32), priority=coarse.node_of.astype(np.float64)
    )
    whole = Plan().placing(np.zeros(coarse.graph.num_ops, dtype=np.int32))
    assert simulate(small, whole).peak_bytes[0] >= simulate(fine, by_node).peak_bytes[0]


@given(training_graphs())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_units_of_one_op_keep_every_op(graph):
    single = np.arange(graph.num_ops, dtype=np.int32)
    coarse = fuse(graph, single, np.ones(graph.num_ops))
    assert coarse.graph.num_ops == graph.num_ops
    assert sorted(coarse.graph.op_names) == sorted(graph.op_names)
    tensors = coarse.graph.held_bytes.sum() + coarse.graph.workspace_bytes.sum()
    assert tensors >= graph.held_bytes.sum()


@pytest.mark.parametrize("family", ["layered", "series-parallel", "transformer", "gnmt"])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_units_of_larger_graphs_fuse_without_cycles(family, seed):
    graph = generate(family, 400, seed)
    units = np.random.default_rng(seed).integers(0, 12, graph.num_ops).astype(np.int32)
    coarse = fuse(graph, units, np.ones(graph.num_ops))
    verify_graph(coarse.graph)
    assert nx.is_directed_acyclic_graph(nx.DiGraph(_edges(graph, coarse.node_of)))
    forward = forward_only(graph, units, np.ones(graph.num_ops))
    verify_graph(forward.graph)


@pytest.mark.parametrize(("family", "num_ops"), [("transformer", 900), ("gnmt", 900)])
def test_memory_of_a_fused_training_step_is_close_to_that_of_its_ops(family, num_ops):
    graph = generate(family, num_ops, 2)
    units = co_placed(graph, np.ones(graph.num_ops), max_group_s=60.0, max_group_bytes=2**40)
    coarse = fuse(graph, units, np.ones(graph.num_ops))
    assert coarse.graph.num_ops < 0.98 * graph.num_ops
    cluster = joined(1)
    fine = problem_of(graph, cluster, np.ones(graph.num_ops))
    small = problem_of(coarse.graph, cluster, np.ones(coarse.graph.num_ops))
    on_one = np.zeros(graph.num_ops, dtype=np.int32)
    by_node = simulate(fine, Plan().placing(on_one, priority=coarse.node_of.astype(float)))
    whole = simulate(small, Plan().placing(on_one[: coarse.graph.num_ops]))
    assert by_node.peak_bytes[0] <= whole.peak_bytes[0] <= 1.05 * by_node.peak_bytes[0]


def test_workspace_is_the_most_that_lives_inside_a_node_at_once():
    builder = GraphBuilder("inside")
    tensor = builder.tensor("x", 1, role=Role.INPUT)
    for index, (made, workspace) in enumerate([(100, 7), (40, 0), (5, 90), (3, 0)]):
        op = builder.op(f"op{index}", reads=[tensor], flops=1.0, workspace_bytes=workspace)
        tensor = builder.tensor(f"t{index}", made, producer=op)
    builder.op("last", reads=[tensor], flops=1.0)
    units = np.array([0, 0, 0, 0, 1], dtype=np.int32)
    coarse = fuse(builder.build(), units, np.ones(5)).graph
    # 100 + 40 while op1 runs, 40 + 5 + 90 while op2 does; t3 leaves the node.
    assert coarse.workspace_bytes.tolist() == [140, 0]
    assert coarse.tensor_names == ("x", "t3")


def test_views_that_leave_together_are_one_tensor_of_the_storage():
    builder = GraphBuilder("views")
    source = builder.op("product", flops=1.0)
    whole = builder.tensor("whole", 30, producer=source)
    pieces = []
    for index in range(3):
        view = builder.op(f"view{index}", reads=[whole])
        pieces.append(builder.tensor(f"piece{index}", 10, producer=view, alias_of=whole))
    for index, piece in enumerate(pieces):
        builder.op(f"reader{index}", reads=[piece], flops=1.0)
    graph = builder.build()
    coarse = fuse(graph, np.array([0, 0, 0, 0, 1, 2, 3], dtype=np.int32), np.ones(7))
    assert coarse.graph.num_ops == 4
    assert coarse.graph.tensor_bytes.tolist() == [30]
    assert coarse.tensor_of.tolist() == [-1, 0, 0, 0]


def test_stated_times_are_summed_and_impossible_ones_stay_so():
    builder = GraphBuilder("stated")
    first = builder.tensor("a", 4, producer=builder.op("a"))
    second = builder.tensor("b", 4, producer=builder.op("b", reads=[first]))
    builder.op("c", reads=[second])
    op_s = {"*": np.array([1.0, 2.0, 4.0]), "cpu": np.array([1.0, np.inf, 4.0])}
    graph = builder.build(stated=StatedTimes(op_s, np.array([0.5, 0.25])))
    coarse = fuse(graph, np.array([0, 0, 1], dtype=np.int32), np.ones(3)).graph
    assert coarse.stated.op_s["*"].tolist() == [3.0, 4.0]
    assert coarse.stated.op_s["cpu"].tolist() == [np.inf, 4.0]
    assert coarse.stated.tensor_s.tolist() == [0.25]
    assert coarse.meta == {"coarse_of": "stated", "ops": 3}


def test_partners_are_the_nodes_of_partners():
    graph = generate("transformer", 300, 0)
    units = co_placed(graph, np.ones(graph.num_ops), max_group_s=40.0, max_group_bytes=2**40)
    coarse = fuse(graph, units, np.ones(graph.num_ops))
    has_partner = np.flatnonzero(coarse.graph.partner >= 0)
    assert len(has_partner)
    assert set(coarse.graph.op_phase[has_partner].tolist()) == {Phase.BACKWARD}
    for node in has_partner:
        ops = np.flatnonzero(coarse.node_of == node)
        partners = graph.partner[ops][graph.partner[ops] >= 0]
        assert coarse.graph.partner[node] in set(coarse.node_of[partners].tolist())


def test_an_empty_graph_fuses_to_an_empty_graph():
    graph = GraphBuilder("empty").build()
    nothing = np.zeros(0, dtype=np.int32)
    assert fuse(graph, nothing, np.zeros(0)).graph.num_ops == 0
    assert forward_only(graph, nothing, np.zeros(0)).graph.num_ops == 0
    assert co_placed(graph, np.zeros(0), max_group_s=1.0, max_group_bytes=1).tolist() == []
