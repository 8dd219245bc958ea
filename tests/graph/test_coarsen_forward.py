"""Forward-only graphs: one node per unit, with the time and memory of the whole step inside."""

import networkx as nx
import numpy as np
import pytest
from graph.training_graphs import training_graphs, units_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import joined, problem_of

from hocket.graph import GraphBuilder, Phase, Role, generate, verify_graph
from hocket.graph.coarsen import co_placed, forward_only
from hocket.plan.plan import Plan
from hocket.planners.placement.coarse import coarse_problem, expand
from hocket.simulate.engine import simulate


@st.composite
def forward_cases(draw):
    graph = draw(training_graphs())
    units = draw(units_of(graph))
    return graph, units, forward_only(graph, units, np.ones(graph.num_ops))


@given(forward_cases())
@settings(derandomize=True, deadline=None, max_examples=80)
def test_a_forward_graph_is_a_legal_graph(case):
    verify_graph(case[2].graph)


@given(forward_cases())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_every_op_has_a_node_of_its_unit(case):
    graph, units, coarse = case
    forward = graph.op_phase == Phase.FORWARD
    forward = forward if forward.any() else ~forward
    placed_units = set(units[forward].tolist())
    for node in range(coarse.graph.num_ops):
        ops = np.flatnonzero(coarse.node_of == node)
        assert forward[ops].any()
        assert len(set(units[ops].tolist()) & placed_units) == 1
    for unit in placed_units:
        nodes = sorted(set(coarse.node_of[units == unit].tolist()))
        groups = set(coarse.graph.group[nodes].tolist())
        assert groups == {-1} if len(nodes) == 1 else len(groups) == 1 and -1 not in groups


@given(forward_cases())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_units_are_split_only_where_they_depend_on_each_other_in_a_circle(case):
    graph, units, coarse = case
    forward = graph.op_phase == Phase.FORWARD
    forward = forward if forward.any() else ~forward
    src, dst = graph.edges
    inner = forward[src] & forward[dst]
    between = nx.DiGraph()
    between.add_nodes_from(units[forward].tolist())
    between.add_edges_from(zip(units[src[inner]].tolist(), units[dst[inner]].tolist(), strict=True))
    for circle in nx.strongly_connected_components(between):
        for unit in circle:
            nodes = set(coarse.node_of[forward & (units == unit)].tolist())
            assert len(circle) > 1 or len(nodes) == 1


@pytest.mark.parametrize(
    ("family", "num_ops", "most"),
    [("transformer", 900, 1.35), ("transformer", 4000, 1.35), ("gnmt", 900, 1.1)],
)
def test_memory_of_the_forward_graph_covers_the_whole_step(family, num_ops, most):
    graph = generate(family, num_ops, 1)
    units = co_placed(graph, np.ones(graph.num_ops), max_group_s=60.0, max_group_bytes=2**40)
    coarse = forward_only(graph, units, np.ones(graph.num_ops))
    fine = problem_of(graph, joined(1), np.ones(graph.num_ops))
    small = coarse_problem(fine, coarse)
    whole = Plan().placing(np.zeros(coarse.graph.num_ops, dtype=np.int32))
    by_op = simulate(fine, expand(fine, coarse, whole)).peak_bytes[0]
    assert 0.99 * by_op <= simulate(small, whole).peak_bytes[0] <= most * by_op


@pytest.mark.parametrize("family", ["transformer", "gnmt"])
def test_memory_of_the_forward_graph_covers_each_of_several_devices(family):
    graph = generate(family, 900, 1)
    units = co_placed(graph, np.ones(graph.num_ops), max_group_s=60.0, max_group_bytes=2**40)
    coarse = forward_only(graph, units, np.ones(graph.num_ops))
    fine = problem_of(graph, joined(3, 1e12), np.ones(graph.num_ops))
    small = coarse_problem(fine, coarse)
    count = coarse.graph.num_ops
    blocks = Plan().placing((np.arange(count) * 3 // count).astype(np.int32))
    planned = simulate(small, blocks).peak_bytes
    needed = simulate(fine, expand(fine, coarse, blocks)).peak_bytes
    assert np.all(planned >= 0.95 * needed)
    assert np.all(planned <= 1.4 * needed)


def _two_layers():
    """Two layers with a shared input copy, gradients and optimizer state, sizes as digits."""
    builder = GraphBuilder("two layers")
    batch = builder.tensor("x", 1, role=Role.INPUT)
    weights = [builder.tensor(f"w{i}", 10**2, role=Role.PARAMETER) for i in range(2)]
    states = [builder.tensor(f"s{i}", 2 * 10**2, role=Role.OPTIMIZER_STATE) for i in range(2)]
    first = builder.op("f0", reads=[batch, weights[0]], flops=1.0)
    hidden = builder.tensor("hidden", 10**4, producer=first)
    second = builder.op("f1", reads=[hidden, weights[1]], flops=1.0, workspace_bytes=3)
    loss = builder.tensor("loss", 1, producer=second, role=Role.OUTPUT)
    back = builder.op(
        "b1", reads=[loss, hidden, weights[1]], phase=Phase.BACKWARD, partner=second, flops=2.0
    )
    upstream = builder.tensor("dhidden", 10**6, producer=back)
    gradients = [builder.tensor("g1", 10**2, producer=back, role=Role.GRADIENT)]
    last = builder.op("b0", reads=[upstream, batch], phase=Phase.BACKWARD, partner=first, flops=2.0)
    gradients.insert(0, builder.tensor("g0", 10**2, producer=last, role=Role.GRADIENT))
    for i in range(2):
        builder.op(
            f"o{i}", reads=[weights[i], states[i], gradients[i]], phase=Phase.OPTIMIZER, group=i
        )
    return builder.build()


def test_a_node_says_what_its_step_holds():
    graph = _two_layers()
    units = np.array([int(name[1]) for name in graph.op_names], dtype=np.int32)
    coarse = forward_only(graph, units, np.ones(graph.num_ops)).graph
    assert coarse.op_names == ("f0", "f1")
    made = {
        coarse.tensor_names[t]: (int(coarse.tensor_bytes[t]), Role(int(coarse.tensor_role[t])))
        for t in range(coarse.num_tensors)
        if coarse.tensor_producer[t] >= 0
    }
    # Layer 0 never reads its output again, layer 1 keeps its copy of it for its backward op.
    assert made == {
        "hidden": (10**4, Role.ACTIVATION),
        "g0": (10**2, Role.GRADIENT),
        "loss": (1, Role.OUTPUT),
        "g1": (10**2, Role.GRADIENT),
        "hidden kept by f1": (10**4, Role.OUTPUT),
    }
    # The gradient of the hidden layer passes through both nodes.
    assert coarse.workspace_bytes.tolist() == [10**6, 10**6]
    read = [{coarse.tensor_names[t] for t in coarse.reads_of(node)} for node in range(2)]
    assert read == [{"x", "w0", "s0"}, {"hidden", "w1", "s1"}]


def test_what_forward_sends_comes_back_as_a_gradient():
    graph = _two_layers()
    units = np.array([int(name[1]) for name in graph.op_names], dtype=np.int32)
    coarse = forward_only(graph, units, np.ones(graph.num_ops))
    trips = dict(zip(coarse.graph.tensor_names, coarse.trips.tolist(), strict=True))
    assert trips["hidden"] == 2
    assert trips["w0"] == trips["loss"] == 1


def test_a_gradient_that_several_nodes_add_to_is_one_storage():
    graph = generate("gnmt", 60, 0)
    cells = {op: graph.module_of(op) + graph.op_names[op].split(".step")[-1].split(".")[0]
             for op in range(graph.num_ops)}  # fmt: skip
    number: dict[str, int] = {}
    units = np.array([number.setdefault(cells[op], len(number)) for op in range(graph.num_ops)])
    coarse = forward_only(graph, units.astype(np.int32), np.ones(graph.num_ops)).graph
    gradients = coarse.tensor_role == Role.GRADIENT
    expected = graph.held_bytes[graph.tensor_role == Role.GRADIENT].sum()
    assert coarse.held_bytes[gradients].sum() == expected
    assert gradients.sum() > (coarse.held_bytes[gradients] > 0).sum() > 0


def test_units_without_forward_ops_join_the_unit_that_they_read_most_from():
    builder = GraphBuilder("loose")
    small = builder.tensor("small", 1, producer=builder.op("a", flops=1.0))
    large = builder.tensor("large", 9, producer=builder.op("b", flops=1.0))
    op = builder.op("late", reads=[small, large], phase=Phase.BACKWARD, flops=1.0)
    passed = builder.tensor("passed", 5, producer=op)
    builder.op("later", reads=[passed], phase=Phase.OPTIMIZER, flops=1.0)
    coarse = forward_only(builder.build(), np.arange(4, dtype=np.int32), np.ones(4))
    assert coarse.node_of.tolist() == [0, 1, 1, 1]
