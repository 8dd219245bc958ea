"""Favourite children: published cases, the net, the matching and the whole."""

from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from planners.favourite_nets import (
    assert_matching,
    close,
    greedy_edges,
    least_by_hand,
    net_from,
    nets_with_favours,
    pairs_of,
)
from simulate.problems import joined, problem_of, problems

from hocket.api import make_problem
from hocket.graph import GraphBuilder
from hocket.graph.generators import generate
from hocket.planners.placement import favourite_child as children
from hocket.planners.placement.favourite_child import (
    favourite_children,
    longest_path_s,
    match_favourites,
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
    assert found.method == "linear programme"


def test_case_a_has_the_same_favourites_by_descent(monkeypatch):
    monkeypatch.setattr(children, "optimal_favours", lambda net: None)
    found = favourite_children(problem_from(*CASE_A))
    assert pairs_of(found.child) == FAVOURITES_A
    assert found.path_s == pytest.approx(8.0, rel=0.01)
    assert found.method == "descent"


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
    for edge, (src, dst) in enumerate(pairs):
        alone = [s for s, _ in pairs].count(src) == 1 == [d for _, d in pairs].count(dst)
        assert net.is_free[edge] == alone


def test_net_takes_ops_that_no_device_can_run():
    problem = problem_from([np.inf, 2.0], {})
    assert net_of(problem).op_s.tolist() == [0.0, 2.0]


# ── matching ─────────────────────────────────────────────────────────────────────────────────


@given(nets_with_favours())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_matching_has_the_greatest_weight_and_keeps_whole_favours(drawn):
    net, favour = drawn
    child = match_favourites(net, favour)
    assert_matching(child, net)
    is_chosen = child[net.src] == net.dst
    assert not is_chosen[favour == 0].any()
    assert is_chosen[favour == 1].all()
    weight = favour * net.cost_s
    sides = networkx.Graph()
    for edge in range(len(net.src)):
        sides.add_edge(("src", net.src[edge]), ("dst", net.dst[edge]), weight=weight[edge])
    best = networkx.max_weight_matching(sides)
    assert weight[is_chosen].sum() == close(sum(sides.edges[pair]["weight"] for pair in best))


@given(nets_with_favours())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_large_matching_takes_the_heaviest_edges_first(drawn):
    net, favour = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "_MAX_EXACT_EDGES", -1)
        child = match_favourites(net, favour)
    assert_matching(child, net)
    is_chosen = child[net.src] == net.dst
    assert is_chosen[favour == 1].all()
    weight = favour * net.cost_s
    assert np.flatnonzero(is_chosen & (weight > 0)).tolist() == sorted(greedy_edges(net, weight))


def test_displaced_reader_takes_its_place_among_equals(monkeypatch):
    # Op 4 displaces op 2 at op 0; at op 1 the edge to op 2 stands before the equal one to op 3.
    net = net_from([1.0] * 5, [(0, 2), (1, 2), (1, 3), (0, 4)], [2.0, 1.0, 1.0, 3.0])
    monkeypatch.setattr(children, "_MAX_EXACT_EDGES", -1)
    assert match_favourites(net, np.full(4, 0.5)).tolist() == [4, 2, -1, -1, -1]


# ── the whole ────────────────────────────────────────────────────────────────────────────────


@given(problems(max_ops=14))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_favourites_of_generated_problems_are_legal_and_repeatable(problem):
    found, again = favourite_children(problem), favourite_children(problem)
    net = net_of(problem)
    assert_matching(found.child, net)
    assert found.child.tolist() == again.child.tolist()
    assert found.path_s == again.path_s == close(least_by_hand(net))
    cost_s = dict(
        zip(zip(net.src.tolist(), net.dst.tolist(), strict=True), net.cost_s, strict=True)
    )
    spared_s = [cost_s.get((op, int(child)), 0.0) for op, child in enumerate(found.child)]
    assert found.spared_s.tolist() == spared_s
    assert ((found.need >= 0) & (found.need <= (found.child >= 0))).all()


def test_need_is_whole_on_the_long_path_and_none_beside_it():
    # 0 -> 1 is long; 2 -> 3 is a free edge too, with time to spare.
    found = favourite_children(problem_from([5, 5, 1, 1], {0: {1: 2}, 2: {3: 2}}))
    assert found.child.tolist() == [1, -1, 3, -1]
    assert found.need.tolist() == [1, 0, 0, 0]
    assert found.spared_s.tolist() == [2, 0, 2, 0]


def test_large_problem_is_solved_by_descent_and_repeatable():
    problem = make_problem(generate("gnmt", 10_000, 0), "16xv100-16g")
    found, again = favourite_children(problem), favourite_children(problem)
    net = net_of(problem)
    assert found.method == "descent"
    assert_matching(found.child, net)
    assert found.child.tolist() == again.child.tolist()
    # No path can be shorter than if every transfer were free.
    free_s = longest_path_s(net, np.ones(len(net.src)))
    assert free_s <= found.path_s == again.path_s <= 1.02 * free_s


def test_one_device_leaves_only_free_edges():
    found = favourite_children(problem_from(*CASE_A, num_devices=1))
    assert pairs_of(found.child) == {(1, 2), (3, 4)}
    assert found.path_s == close(8.0)
