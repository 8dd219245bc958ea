"""Favourite children: published cases, the net, the matching and the whole."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from planners.favourite_nets import (
    assert_matching,
    close,
    least_by_hand,
    pairs_of,
)
from simulate.problems import joined, problem_of, problems

from hocket.graph import GraphBuilder
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.planners.placement import m_sct as children
from hocket.planners.placement.m_sct import (
    favourite_children,
    longest_path_s,
    net_of,
)
from hocket.planners.tables import mean_transfer_s


def problem_from(
    op_s: list[float], children_of: dict[int, dict[int, int]], num_devices: int = 2
) -> Any:
    """One tensor per edge, whose bytes are its seconds at one byte a second."""
    builder = GraphBuilder("case")
    made: dict[tuple[int, int], int] = {}
    for op in range(len(op_s)):
        reads = [tensor for (_, dst), tensor in made.items() if dst == op]
        number = builder.op(f"op{op}", reads=reads)
        for dst, size in children_of.get(op, {}).items():
            made[op, dst] = builder.tensor(f"{op} to {dst}", size, producer=number)
    return problem_of(builder.build(), joined(num_devices), op_s)


# The published numbers of its ops are 0, 1, 2, 4, 5, 3: here they stand in topological order.
CASE_A = [1, 3, 3, 3, 1, 1], {0: {1: 1, 3: 1}, 1: {2: 1}, 2: {5: 1}, 3: {4: 1}, 4: {5: 1}}

FAVOURITES_A = {(0, 1), (1, 2), (2, 5), (3, 4)}


def test_case_a_has_the_published_favourites():
    found = favourite_children(problem_from(*CASE_A))
    assert pairs_of(found.child) == FAVOURITES_A
    assert found.path_s == close(8.0)


def test_case_a_has_the_same_favourites_by_descent(monkeypatch):
    monkeypatch.setattr(children, "optimal_favours", lambda net: None)
    found = favourite_children(problem_from(*CASE_A))
    assert pairs_of(found.child) == FAVOURITES_A
    assert found.path_s == pytest.approx(8.0, rel=0.01)


def test_case_b_keeps_favourites_that_rounding_at_a_tenth_would_lose():
    edges = {
        0: {2: 1, 3: 5, 4: 2},
        1: {2: 1, 3: 1, 4: 1},
        2: {5: 5, 6: 3},
        3: {5: 4, 6: 1, 7: 5},
        4: {8: 1},
    }
    problem = problem_from([6, 7, 9, 8, 10, 6, 6, 10, 6], edges)
    net = net_of(problem)
    found = favourite_children(problem)
    assert len(pairs_of(found.child)) > 1
    assert found.path_s == close(least_by_hand(net))


# ── the net ──────────────────────────────────────────────────────────────────────────────────


@given(problems(max_ops=10))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_net_has_the_mean_cost_of_every_tensor_on_an_edge(problem):
    net, graph = net_of(problem), problem.graph
    seconds = mean_transfer_s(problem)
    expected: dict[tuple[int, int], float] = {}
    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op).tolist():
            maker = int(graph.tensor_producer[tensor])
            if maker >= 0:
                expected[maker, op] = expected.get((maker, op), 0.0) + float(seconds[tensor])
    pairs = list(zip(net.src.tolist(), net.dst.tolist(), strict=True))
    assert pairs == sorted(expected, key=lambda e: (e[1], e[0]))
    assert net.cost_s.tolist() == close([expected[pair] for pair in pairs])
    rows = problem.costs.op_s[problem.costs.device_row]
    assert net.op_s.tolist() == rows.min(axis=0).tolist()


def test_net_takes_ops_that_no_device_can_run():
    problem = problem_from([np.inf, 2.0], {})
    assert net_of(problem).op_s.tolist() == [0.0, 2.0]


# ── the whole ────────────────────────────────────────────────────────────────────────────────


@given(problems(max_ops=14))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_favourites_of_generated_problems_are_legal_and_repeatable(problem):
    found, again = favourite_children(problem), favourite_children(problem)
    net = net_of(problem)
    assert_matching(found.child, net)
    assert found.child.tolist() == again.child.tolist()
    assert found.path_s == again.path_s
    cost_s = dict(
        zip(zip(net.src.tolist(), net.dst.tolist(), strict=True), net.cost_s, strict=True)
    )
    spared_s = [cost_s.get((op, int(child)), 0.0) for op, child in enumerate(found.child)]
    assert found.spared_s.tolist() == spared_s


def test_only_edges_on_long_paths_have_favourites():
    # 0 -> 1 is long; 2 -> 3 is an edge without rivals too, with time to spare.
    found = favourite_children(problem_from([5, 5, 1, 1], {0: {1: 2}, 2: {3: 2}}))
    assert found.child.tolist() == [1, -1, -1, -1]
    assert found.spared_s.tolist() == [2, 0, 0, 0]


def test_large_problem_is_solved_by_descent_and_repeatable():
    problem = make_problem(generate("gnmt", 10_000, 0), "16xv100-16g")
    found, again = favourite_children(problem), favourite_children(problem)
    net = net_of(problem)
    assert_matching(found.child, net)
    assert found.child.tolist() == again.child.tolist()
    # No path can be shorter than if every transfer were free.
    free_s = longest_path_s(net, np.ones(len(net.src)))
    assert free_s <= found.path_s == again.path_s <= 1.03 * free_s


def test_one_device_has_no_favourites():
    found = favourite_children(problem_from(*CASE_A, num_devices=1))
    assert pairs_of(found.child) == set()
    assert found.path_s == close(8.0)
