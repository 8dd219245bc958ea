"""Generated graphs: size as promised, same for a seed, and of the promised shape."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.graph import FAMILIES, Graph, Phase, Role, generate

SEEDS = st.integers(0, 2**32 - 1)


def as_networkx(graph: Graph) -> nx.DiGraph:
    found = nx.DiGraph()
    found.add_nodes_from(range(graph.num_ops))
    found.add_edges_from(zip(*(end.tolist() for end in graph.edges), strict=True))
    return found


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 3000), SEEDS)
def test_generate_gives_the_promised_number_of_ops(family, num_ops, seed):
    num_ops = max(num_ops, FAMILIES[family].min_ops)
    graph = generate(family, num_ops, seed)
    allowed = {"gnmt": graph.meta.get("layers", 0) + 1, "transformer": 17}.get(family, 0)
    assert abs(graph.num_ops - num_ops) <= allowed
    assert np.all(graph.bytes_touched > 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_depends_on_the_seed_and_on_nothing_else(family):
    hashes = [generate(family, 400, seed).content_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("family", "beginning"),
    [
        ("chain", "b572189d4993a042"),
        ("series-parallel", "12e17afa4e0a0100"),
        ("layered", "d7a0d2d570916277"),
        ("gnmt", "493ddb22c17737ab"),
        ("transformer", "219bdac9f00c94d7"),
    ],
)
def test_generate_stays_what_stored_measurements_were_made_with(family, beginning):
    assert generate(family, 500, 42).content_hash.startswith(beginning)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 300), SEEDS)
def test_chain_is_a_path(num_ops, seed):
    src, dst = generate("chain", num_ops, seed).edges
    assert src.tolist() == list(range(num_ops - 1))
    assert dst.tolist() == list(range(1, num_ops))


def is_series_parallel(graph: nx.DiGraph) -> bool:
    """Whether series and parallel reductions of the arcs leave one arc between two terminals."""
    multi = nx.MultiDiGraph(graph)
    multi.add_edges_from(("source", n) for n in graph if graph.in_degree(n) == 0)
    multi.add_edges_from((n, "sink") for n in graph if graph.out_degree(n) == 0)
    waiting = set(graph)
    while waiting:
        node = waiting.pop()
        if not multi.has_node(node):
            continue
        before, after = set(multi.predecessors(node)), set(multi.successors(node))
        if len(before) != 1 or len(after) != 1:
            continue
        (src,), (dst,) = before, after
        multi.remove_node(node)
        multi.add_edge(src, dst)
        waiting |= {src, dst} - {"source", "sink"}
    return set(multi) == {"source", "sink"}


def test_series_parallel_oracle_knows_the_smallest_counterexample():
    assert not is_series_parallel(nx.DiGraph([(0, 1), (0, 2), (1, 3), (2, 3), (1, 2)]))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 300), SEEDS)
def test_series_parallel_reduces_to_one_arc(num_ops, seed):
    graph = as_networkx(generate("series-parallel", num_ops, seed))
    assert is_series_parallel(graph)
    assert sum(degree == 0 for _, degree in graph.in_degree()) == 1
    assert sum(degree == 0 for _, degree in graph.out_degree()) == 1


def test_series_parallel_really_has_parallel_parts():
    graph = as_networkx(generate("series-parallel", 500, 0))
    assert max(degree for _, degree in graph.out_degree()) in (2, 3, 4)
    assert nx.dag_longest_path_length(graph) < 400


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 2000), SEEDS)
def test_layered_ops_read_only_the_three_layers_before(num_ops, seed):
    graph = generate("layered", num_ops, seed)
    width = min(64, int(num_ops**0.5 + 1e-9))
    src, dst = graph.edges
    back = dst // width - src // width
    assert np.all((back >= 1) & (back <= 3))
    readers = np.unique(dst)
    assert readers.tolist() == list(range(width, num_ops))
    assert np.bincount(dst, minlength=num_ops).max(initial=0) <= 3


def training_steps() -> list[Graph]:
    return [generate("gnmt", 900, 3), generate("transformer", 900, 3)]


@pytest.mark.parametrize("graph", training_steps(), ids=lambda graph: graph.name)
def test_training_step_mirrors_forward_ops_in_backward_ops(graph):
    forward = np.flatnonzero(graph.op_phase == Phase.FORWARD)
    backward = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    assert set(graph.partner[backward].tolist()) == set(forward.tolist())
    assert all(graph.module_of(op) == graph.module_of(graph.partner[op]) for op in backward)
    assert np.all(graph.partner[forward] == -1)
    path = as_networkx(graph)
    assert all(nx.has_path(path, int(graph.partner[op]), int(op)) for op in backward[::17])


@pytest.mark.parametrize("graph", training_steps(), ids=lambda graph: graph.name)
def test_training_step_updates_every_weight_once_from_its_gradient(graph):
    roles = graph.tensor_role
    weights = np.flatnonzero((roles == Role.PARAMETER) & (graph.tensor_producer < 0))
    updated = np.flatnonzero((roles == Role.PARAMETER) & (graph.tensor_producer >= 0))
    assert sorted(graph.alias_of[updated].tolist()) == weights.tolist()
    for tensor in updated:
        op = graph.tensor_producer[tensor]
        assert graph.op_phase[op] == Phase.OPTIMIZER
        read_roles = sorted(roles[graph.reads_of(op)].tolist())
        assert read_roles == sorted([Role.PARAMETER, Role.OPTIMIZER_STATE, Role.GRADIENT])
    held = graph.bytes_by_role()
    assert held["gradient"] == held["parameter"] == held["optimizer_state"] // 2


@pytest.mark.parametrize("graph", training_steps(), ids=lambda graph: graph.name)
def test_training_step_wastes_no_tensor(graph):
    unread = np.flatnonzero(np.diff(graph.user_ptr) == 0)
    kept = (Role.OUTPUT, Role.PARAMETER)
    assert set(graph.tensor_role[unread].tolist()) <= {int(role) for role in kept}


def test_gnmt_cells_share_the_weight_of_their_layer_over_all_steps():
    graph = generate("gnmt", 900, 3)
    steps = graph.meta["steps"]
    weight = graph.tensor_names.index("layers.2.weight")
    users = [graph.op_names[op] for op in graph.users_of(weight)]
    assert len(users) == 2 * steps + 1
    cell = graph.op_names.index("layers.2.step3")
    names = [graph.tensor_names[t] for t in graph.reads_of(cell)]
    assert sorted(names) == ["layers.1.step3.out", "layers.2.step2.out", "layers.2.weight"]


def test_gnmt_gradient_of_a_weight_is_one_storage():
    graph = generate("gnmt", 900, 3)
    gradients = np.flatnonzero(graph.tensor_role == Role.GRADIENT)
    owners = gradients[graph.alias_of[gradients] < 0]
    assert len(owners) == graph.meta["layers"] + 1


def test_transformer_has_the_weights_and_flops_of_the_model_it_describes():
    graph = generate("transformer", 900, 3)
    meta = graph.meta
    blocks, h, tokens = meta["blocks"], meta["hidden"], meta["batch"] * meta["sequence"]
    elements = blocks * (12 * h * h + 4 * h) + 2 * 50_257 * h
    assert graph.bytes_by_role()["parameter"] == 4 * elements
    products = np.array([graph.kind_of(op).startswith("matmul") for op in range(graph.num_ops)])
    forward = products & (graph.op_phase == Phase.FORWARD)
    attention = blocks * 4 * tokens * meta["sequence"] * h
    expected = 2 * tokens * (blocks * 12 * h * h + 50_257 * h) + attention
    assert graph.flops[forward].sum() == pytest.approx(expected)
    backward = products & (graph.op_phase == Phase.BACKWARD)
    assert graph.flops[backward].sum() == pytest.approx(2 * expected)


def test_transformer_module_paths_name_the_block_and_its_part():
    graph = generate("transformer", 900, 3)
    assert graph.module_of(graph.op_names.index("blocks.3.attn.qkv")) == "blocks.3.attn"
    assert graph.module_of(graph.op_names.index("blocks.3.mlp.fc.backward")) == "blocks.3.mlp"
    blocks = {m.split(".")[1] for m in graph.modules if m.startswith("blocks.")}
    assert len(blocks) == graph.meta["blocks"]


@pytest.mark.parametrize(
    ("family", "num_ops", "seed", "message", "hint"),
    [
        ("transfomer", 100, 0, "unknown family of graphs", "did you mean 'transformer'"),
        ("chain", 0, 0, "number of ops is 0", "from 1 to"),
        ("transformer", 42, 0, "number of ops is 42", "from 43 to"),
        ("chain", 10**9, 0, "number of ops is 1000000000", "to 1000000"),
        ("chain", 10, -1, "seed is -1", "from 0 to"),
        ("chain", 10, 2**32, "seed is", "from 0 to"),
    ],
)  # fmt: skip
def test_generate_refuses_what_it_cannot_make(family, num_ops, seed, message, hint):
    with pytest.raises(UsageError) as caught:
        generate(family, num_ops, seed)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_generate_scales_to_a_hundred_thousand_ops():
    graph = generate("transformer", 100_000)
    assert graph.num_ops > 99_900
