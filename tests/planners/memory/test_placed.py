"""The memory order of placements: legal, never worse, and what `auto` takes where memory lacks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import graphs, joined, plans, problem_of, problems

from hocket.graph import GraphBuilder
from hocket.plan.plan import Plan
from hocket.plan.verify import structure_violations
from hocket.planners.compare import compare
from hocket.planners.memory.hoist import peak_bytes
from hocket.planners.memory.placed import order_for_memory
from hocket.planners.memory.storages import device_storages, storages_of
from hocket.simulate import simulate
from hocket.simulate.engine import instructions_of


def on_one(graph, memory_bytes=None):
    problem = problem_of(graph, joined(1), np.ones((1, graph.num_ops)))
    return problem, Plan(planner="one").placing(np.zeros(graph.num_ops, dtype=np.int32))


@given(graphs(10))
@settings(max_examples=25, deadline=None)
def test_one_device_holds_the_storages_of_the_graph(graph):
    problem, plan = on_one(graph)
    whole, placed = storages_of(graph), device_storages(graph, instructions_of(problem, plan), 0)
    assert whole.start_bytes == placed.start_bytes
    for column in ("num_bytes", "producer", "is_kept", "readers", "passing_bytes", "before"):
        assert np.array_equal(getattr(whole, column), getattr(placed, column)), column


@given(graphs(10))
@settings(max_examples=25, deadline=None)
def test_on_one_device_the_simulated_peak_is_the_bound_or_above(graph):
    problem, plan = on_one(graph)
    made = order_for_memory(problem, plan)
    peak = simulate(problem, made).peak_bytes[0]
    assert peak <= simulate(problem, plan).peak_bytes[0]
    if made.by_device is not None:
        storages = storages_of(graph)
        assert peak == storages.start_bytes + peak_bytes(storages, made.by_device[0])
        assert made.claims.peak_bound_bytes[0] <= peak


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_orders_of_placements_are_legal_and_never_need_more(data):
    problem = data.draw(problems(max_ops=10, max_devices=3))
    plan = data.draw(plans(problem))
    made = order_for_memory(problem, plan)
    assert not list(structure_violations(made, problem))
    assert np.array_equal(made.device_of, plan.device_of)
    before, after = (simulate(problem, each) for each in (plan, made))
    lacks = [np.maximum(t.peak_bytes - problem.memory_bytes, 0).sum() for t in (before, after)]
    assert lacks[1] <= lacks[0]


def two_hills(size):
    """Two chains of a hill each, listed so that both hills stand at once."""
    builder = GraphBuilder("hills")
    held = []
    for name in "ab":
        up = builder.op(f"{name}.up")
        held.append(builder.tensor(f"{name}.held", size, producer=up))
    for name, tensor in zip("ab", held, strict=True):
        builder.op(f"{name}.down", reads=[tensor])
    return builder.build()


def test_hills_stand_one_by_one_where_memory_is_short():
    graph = two_hills(2**29 + 1)  # of 1 GiB, with both hills just too much
    problem = problem_of(graph, joined(1), np.ones((1, graph.num_ops)))
    tried = {c.planner: c for c in compare(problem, ["m-topo"]).candidates}
    assert not tried["m-topo"].feasible
    relieved = tried["m-topo + memory-order"]
    assert relieved.feasible
    assert relieved.timeline.peak_bytes[0] == 2**29 + 1
    assert relieved.plan.claims.peak_bound_bytes == (2**29 + 1,)
