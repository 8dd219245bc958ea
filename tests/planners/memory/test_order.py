"""Orders that hold few bytes: legal, never worse, bounded, and the best where all can be tried."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.memory.brute_force import befores, best_peak
from planners.memory.step_graphs import graph_of_edges, olla, read_step_graph
from simulate.problems import graphs, joined, numbers, problem_of, topological_order

from hocket.graph import GraphBuilder, Role
from hocket.plan.plan import Plan
from hocket.planners.memory import (
    bounded_order,
    memory_order,
    order_bound,
)
from hocket.planners.memory.hoist import peak_bytes
from hocket.planners.memory.storages import storages_of
from hocket.simulate import simulate

DATA = Path(__file__).parents[4] / "shared" / "data" / "memory"
MIB = 2**20


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_storages_hold_what_the_simulator_holds(data):
    graph = data.draw(graphs(10))
    keys = numbers(data.draw, graph.num_ops, (0.0, 1.0, 2.0, 3.0))
    order = np.array(topological_order(graph, keys.tolist()), dtype=np.int32)
    problem = problem_of(graph, joined(1), np.ones((1, graph.num_ops)))
    plan = Plan(planner="given").placing(np.zeros(graph.num_ops, dtype=np.int32))
    timeline = simulate(problem, plan.ordered(by_device=(order,)))
    storages = storages_of(graph)
    assert timeline.peak_bytes[0] == storages.start_bytes + peak_bytes(storages, order)


@given(graphs(8))
@settings(max_examples=40, deadline=None)
def test_small_graphs_get_their_best_order(graph):
    order, bound = bounded_order(graph)
    position = np.argsort(order)
    assert sorted(order.tolist()) == list(range(graph.num_ops))
    assert all(position[b] < position[op] for op, all_b in enumerate(befores(graph)) for b in all_b)
    best = storages_of(graph).start_bytes + best_peak(graph)
    assert bound.bound_bytes <= best == bound.peak_bytes


@given(graphs(12))
@settings(max_examples=20, deadline=None)
def test_bounds_of_any_order_are_below_the_best(graph):
    bound = order_bound(graph, np.arange(graph.num_ops, dtype=np.int32))
    assert bound.bound_bytes <= bounded_order(graph)[1].peak_bytes
    assert bound.gap >= 0


def two_peaks():
    """Two chains that each pass a hill; the hills are as high as the graph is together at least."""
    builder = GraphBuilder("two hills")
    for name, size in (("a", 40), ("b", 60)):
        up = builder.op(f"{name}.up")
        held = builder.tensor(f"{name}.held", size, producer=up)
        down = builder.op(f"{name}.down", reads=[held])
        builder.tensor(f"{name}.rest", 5, producer=down, role=Role.OUTPUT)
    return builder.build()


def test_hills_come_one_after_the_other():
    graph = two_peaks()
    _, bound = bounded_order(graph)
    assert bound.peak_bytes == bound.bound_bytes == 65
    assert order_bound(graph, np.array([0, 2, 1, 3], dtype=np.int32)).gap == pytest.approx(40 / 65)


def equal_layers(num_layers):
    """A chain backwards in which each layer makes a large gradient beside the small one."""
    builder = GraphBuilder("equal layers")
    saved = []
    for layer in range(num_layers):
        op = builder.op(f"forward {layer}", reads=saved[-1:])
        saved.append(builder.tensor(f"saved {layer}", 10, producer=op))
    passed = saved[-1]
    for layer in reversed(range(num_layers)):
        large = builder.op(f"weight {layer}", reads=[saved[layer], passed])
        gradient = builder.tensor(f"gradient {layer}", 40, producer=large)
        small = builder.op(f"input {layer}", reads=[passed])
        passed = builder.tensor(f"passed {layer}", 10, producer=small)
        builder.op(f"update {layer}", reads=[gradient, passed])
    return builder.build()


def test_equal_layers_get_their_best_order():
    _, bound = bounded_order(equal_layers(6))
    assert bound.gap == 0


def test_an_empty_graph_has_an_order():
    graph = GraphBuilder("nothing").build()
    order, bound = bounded_order(graph)
    assert len(order) == bound.peak_bytes == bound.gap == 0


def test_draws_of_random_numbers_keep_their_sequence():
    builder = GraphBuilder("draws")
    first = builder.op("first", rng_order=0)
    builder.tensor("drawn", 8, producer=first, role=Role.OUTPUT)
    builder.op("second", rng_order=1, workspace_bytes=64)
    assert memory_order(builder.build()).tolist() == [0, 1]


# ── published and captured graphs ────────────────────────────────────────────────────────────────


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared graphs")
def test_ollas_graphs_get_their_published_optima():
    for name, entry in olla(DATA)["graphs"].items():
        plain = [e["peak"] for e in entry["expected"] if e.get("max_spills") == 0]
        if plain:
            _, bound = bounded_order(graph_of_edges(name, entry["edges"]))
            assert bound.peak_bytes == bound.bound_bytes == plain[0], name


@pytest.mark.skipif(not DATA.exists(), reason="needs the shared graphs")
@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.json.gz")))
def test_captured_steps_get_the_best_known_orders(name):
    graph, reference = read_step_graph(DATA / name)
    _, bound = bounded_order(graph)
    peak = (bound.peak_bytes - bound.start_bytes) / MIB
    assert 0 <= bound.gap < 0.1
    assert peak <= reference["best_known_MiB"] + 0.005
