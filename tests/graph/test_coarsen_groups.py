"""Co-placement units: what must share a device does, and nothing else outgrows the caps."""

import networkx as nx
import numpy as np
import pytest
from graph.training_graphs import training_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.graph import GraphBuilder, Phase, Role, generate
from hocket.graph.coarsen import anchor_of, bound_ops, co_placed, tied_ops
from hocket.graph.coarsen.groups import CHAIN_SHARE, brought_bytes
from hocket.graph.graph import PERSISTENT_ROLES

NO_CAPS = {"max_group_s": np.inf, "max_group_bytes": 2**60}


def _root(graph, tensor):
    while graph.alias_of[tensor] >= 0:
        tensor = int(graph.alias_of[tensor])
    return int(tensor)


def _first_reader(graph, storage):
    """First op that reads a tensor from before the step of the given storage."""
    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op):
            if graph.tensor_producer[tensor] < 0 and _root(graph, tensor) == storage:
                return op
    return None


def _law(graph):
    """Pairs of ops that a legal plan keeps together, one by one."""
    for op in range(graph.num_ops):
        for other in range(op):
            if graph.group[op] >= 0 and graph.group[op] == graph.group[other]:
                yield op, other
    for tensor in range(graph.num_tensors):
        producer, storage = int(graph.tensor_producer[tensor]), _root(graph, tensor)
        is_update = graph.tensor_role[tensor] in PERSISTENT_ROLES and producer >= 0
        if is_update and graph.tensor_producer[storage] < 0:
            yield producer, _first_reader(graph, storage)


def _free_ties(graph):
    """Pairs that may exceed a cap: the law, partners and views."""
    yield from _law(graph)
    for op in range(graph.num_ops):
        if graph.partner[op] >= 0:
            yield op, int(graph.partner[op])
        if not graph.works[op]:
            yield from _view_tie(graph, op)


def _view_tie(graph, op):
    for tensor in graph.made_by(op):
        base = int(graph.alias_of[tensor])
        if base >= 0 and graph.tensor_producer[base] >= 0:
            yield op, int(graph.tensor_producer[base])
            return
        if len(graph.users_of(tensor)):
            yield op, int(graph.users_of(tensor)[0])
            return


def _components(graph, pairs):
    joined = nx.Graph()
    joined.add_nodes_from(range(graph.num_ops))
    joined.add_edges_from(pairs)
    ordered = sorted(nx.connected_components(joined), key=min)
    number = {op: index for index, ops in enumerate(ordered) for op in ops}
    return [number[op] for op in range(graph.num_ops)]


@given(training_graphs())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_bound_ops_are_exactly_what_the_law_joins(graph):
    assert bound_ops(graph).tolist() == _components(graph, _law(graph))


@given(training_graphs())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_caps_of_zero_leave_the_law_partners_and_views(graph):
    op_s = np.ones(graph.num_ops)
    units = co_placed(graph, op_s, max_group_s=0.0, max_group_bytes=0)
    assert units.tolist() == _components(graph, _free_ties(graph))


@given(training_graphs(), st.sampled_from([2.0, 4.0]), st.sampled_from([0, 32, 200]))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_soft_ties_stay_within_both_caps(graph, max_group_s, max_group_bytes):
    op_s = np.ones(graph.num_ops)
    units = co_placed(
        graph, op_s, max_group_s=max_group_s, max_group_bytes=max_group_bytes
    ).tolist()
    free, op_bytes = _components(graph, _free_ties(graph)), brought_bytes(graph)
    for unit in set(units):
        ops = [op for op in range(graph.num_ops) if units[op] == unit]
        if len({free[op] for op in ops}) > 1:
            assert op_s[ops].sum() <= max_group_s
            assert op_bytes[ops].sum() <= max_group_bytes
        assert {op for op in range(graph.num_ops) if free[op] in {free[o] for o in ops}} == set(ops)


@given(training_graphs())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_tied_ops_refine_nothing_that_is_bound(graph):
    bound, tied = bound_ops(graph), tied_ops(graph)
    assert len(set(zip(bound.tolist(), tied.tolist(), strict=True))) == len(set(bound.tolist()))


@given(training_graphs())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_every_unit_has_one_anchor_inside_it(graph):
    units = tied_ops(graph)
    anchors = anchor_of(graph, units)
    assert units[anchors].tolist() == list(range(int(units.max()) + 1))


@given(training_graphs())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_brought_bytes_count_each_lasting_storage_once(graph):
    expected = np.zeros(graph.num_ops, dtype=np.int64)
    for storage in range(graph.num_tensors):
        if graph.alias_of[storage] >= 0:
            continue
        members = [t for t in range(graph.num_tensors) if _root(graph, t) == storage]
        maker = int(graph.tensor_producer[storage])
        held = any(graph.is_held[t] for t in members)
        readers = [op for t in members for op in graph.users_of(t)]
        saved = maker >= 0 and graph.op_phase[maker] == Phase.FORWARD
        saved = saved and any(graph.op_phase[op] == Phase.BACKWARD for op in readers)
        owner = maker if maker >= 0 else _first_reader(graph, storage)
        if (held or saved) and owner is not None:
            expected[owner] += graph.tensor_bytes[storage]
    assert brought_bytes(graph).tolist() == expected.tolist()


@pytest.mark.parametrize("num_ops", [40, 1000])
def test_a_chain_is_cut_by_the_cap(num_ops):
    graph, op_s = generate("chain", num_ops), np.ones(num_ops)
    units = co_placed(graph, op_s, max_group_s=20.0, max_group_bytes=2**60)
    sizes = np.bincount(units)
    assert sizes.max() <= 20 * CHAIN_SHARE
    assert sizes.mean() >= 20 * CHAIN_SHARE / 2
    assert np.bincount(co_placed(graph, op_s, **NO_CAPS)).tolist() == [num_ops]


def test_the_memory_cap_cuts_a_chain_too():
    builder = GraphBuilder("chain")
    previous = builder.tensor("x", 8, role=Role.INPUT)
    for layer in range(8):
        weight = builder.tensor(f"w{layer}", 100, role=Role.PARAMETER)
        op = builder.op(f"op{layer}", reads=[previous, weight], flops=1.0)
        previous = builder.tensor(f"y{layer}", 8, producer=op)
    units = co_placed(builder.build(), np.ones(8), max_group_s=np.inf, max_group_bytes=250)
    assert np.bincount(units).tolist() == [2, 2, 2, 2]


def test_branches_that_start_at_one_op_do_not_join_it():
    builder = GraphBuilder("branches")
    image = builder.tensor("x", 8, role=Role.INPUT)
    stem = builder.tensor("stem.out", 8, producer=builder.op("stem", reads=[image], flops=1.0))
    ends = []
    for branch in range(3):
        first = builder.op(f"a{branch}", reads=[stem], flops=1.0)
        middle = builder.tensor(f"a{branch}.out", 8, producer=first)
        second = builder.op(f"b{branch}", reads=[middle], flops=1.0)
        ends.append(builder.tensor(f"b{branch}.out", 8, producer=second))
    builder.op("add", reads=ends, flops=1.0)
    graph = builder.build()
    # Two ops fit: each branch is one unit, as its first op has one reader.
    units = co_placed(graph, np.ones(8), max_group_s=2 / CHAIN_SHARE, max_group_bytes=2**60)
    by_name = dict(zip(graph.op_names, units.tolist(), strict=True))
    pairs = [{by_name[f"a{branch}"], by_name[f"b{branch}"]} for branch in range(3)]
    assert sum(len(pair) == 1 for pair in pairs) >= 2
    assert by_name["stem"] not in set.union(*pairs)


def test_gates_of_a_recurrent_cell_sit_with_the_product_that_they_work_on():
    builder = GraphBuilder("cell")
    state = builder.tensor("state", 8, role=Role.INPUT)
    product = builder.op("product", reads=[state], flops=1.0)
    gates = [builder.tensor("gates", 32, producer=product)]
    for gate in range(4):
        op = builder.op(f"gate{gate}", reads=[gates[-1]], flops=1.0)
        gates.append(builder.tensor(f"gates{gate}", 32, producer=op, alias_of=gates[-1]))
    for reader in range(2):
        builder.op(f"reader{reader}", reads=gates, flops=1.0)
    units = co_placed(builder.build(), np.ones(7), max_group_s=5.0, max_group_bytes=2**60)
    assert units.tolist() == [0, 0, 0, 0, 0, 1, 2]


def test_a_tied_weight_is_updated_where_it_is_first_read():
    builder = GraphBuilder("tied")
    tokens = builder.tensor("tokens", 8, role=Role.INPUT)
    weight = builder.tensor("weight", 1000, role=Role.PARAMETER)
    embedded = builder.tensor(
        "embedded", 8, producer=builder.op("embed", reads=[tokens, weight], flops=1.0)
    )
    head = builder.op("head", reads=[embedded, weight], flops=1.0)
    builder.tensor("logits", 8, producer=head, role=Role.OUTPUT)
    update = builder.op("update", reads=[weight], phase=Phase.OPTIMIZER, flops=1.0)
    builder.tensor("weight'", 1000, producer=update, role=Role.PARAMETER, alias_of=weight)
    units = co_placed(builder.build(), np.ones(3), max_group_s=0.0, max_group_bytes=0)
    assert units.tolist() == [0, 1, 0]


@pytest.mark.parametrize(("family", "num_ops"), [("transformer", 600), ("gnmt", 600)])
def test_backward_ops_of_a_training_step_sit_with_their_forward_op(family, num_ops):
    graph = generate(family, num_ops, 1)
    op_s = np.ones(graph.num_ops)
    units = co_placed(graph, op_s, max_group_s=30.0, max_group_bytes=2**50)
    paired = np.flatnonzero(graph.partner >= 0)
    assert len(paired)
    assert np.array_equal(units[paired], units[graph.partner[paired]])
    assert int(units.max()) + 1 <= graph.num_ops // 5
