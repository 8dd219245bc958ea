"""Favourite children: published cases, the net, the whole and the linear programme."""

import math
from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from planners.favourite_nets import (
    assert_matching,
    close,
    is_legal,
    least_by_hand,
    longest_by_hand,
    nets,
    pairs_of,
)
from simulate.problems import joined, problem_of, problems

from hocket.graph import GraphBuilder
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.planners.placement import m_sct as children
from hocket.planners.placement.m_sct import favourite_children, optimal_favours
from hocket.planners.tables import ReaderPairs, mean_transfer_s, net_of


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


def test_case_a_has_favourites_along_its_longest_path_without_the_programme(monkeypatch):
    monkeypatch.setattr(children, "optimal_favours", lambda net: None)
    found = favourite_children(problem_from(*CASE_A))
    assert pairs_of(found.child) >= {(0, 1), (1, 2), (2, 5)}


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
    assert longest_by_hand(net, optimal_favours(net)) == close(least_by_hand(net))


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


def test_a_large_problem_has_a_favourite_on_each_step_of_its_longest_path():
    problem = make_problem(generate("gnmt", 10_000, 0), "16xv100-16g")
    found, again = favourite_children(problem), favourite_children(problem)
    net = net_of(problem)
    assert_matching(found.child, net)
    assert found.child.tolist() == again.child.tolist()
    end_s, last = net.op_s.copy(), np.full(len(net.op_s), -1)
    for src, dst, cost_s in zip(net.src, net.dst, net.cost_s, strict=True):
        if last[dst] < 0 or end_s[src] + cost_s + net.op_s[dst] > end_s[dst]:
            end_s[dst], last[dst] = end_s[src] + cost_s + net.op_s[dst], src
    op = int(np.argmax(end_s))
    while last[op] >= 0:
        assert found.child[last[op]] >= 0
        op = int(last[op])


def test_one_device_has_no_favourites():
    found = favourite_children(problem_from(*CASE_A, num_devices=1))
    assert pairs_of(found.child) == set()


# ── the linear programme ─────────────────────────────────────────────────────────────────────


def least_whole(net: ReaderPairs) -> float:
    """The least longest path over all matchings."""
    best = math.inf
    for favour in product((0, 1), repeat=len(net.src)):
        if is_legal(net, np.array(favour, dtype=np.float64)):
            best = min(best, longest_by_hand(net, favour))
    return best


@given(nets())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_linear_programme_is_legal_and_least(net):
    favour = optimal_favours(net)
    assert is_legal(net, favour)
    # Favours that no long path needs are given up for at most a hundredth of a mean transfer.
    sent_s = net.cost_s[net.cost_s > 0]
    spare_s = 0.01 * sent_s.mean() if len(sent_s) else 0.0
    least_s = least_by_hand(net)
    assert least_s - 1e-6 <= longest_by_hand(net, favour) <= least_s + spare_s + 1e-6
    assert longest_by_hand(net, favour) <= least_whole(net) * (1 + 1e-6) + 1e-9
