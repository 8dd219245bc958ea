"""Both relaxations of favourite children: the linear programme and the descent."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planners.favourite_nets import (
    greedy_edges,
    is_legal,
    least_by_hand,
    longest_by_hand,
    nets,
)

from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.planners.placement.m_sct import (
    ReaderPairs,
    descended_favours,
    longest_path_s,
    make_net,
    net_of,
    optimal_favours,
)

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement"

PUBLIC = [
    *sorted((DATA / "dnn-partitioning").glob("throughput-inputs/*/*training.json")),
    *sorted((DATA / "pipedream").rglob("graph.txt")),
]


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


@given(nets(max_edges=14))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_descent_is_legal_and_near_the_least(net):
    least_s = least_by_hand(net)
    favour = descended_favours(net)
    assert is_legal(net, favour)
    assert longest_by_hand(net, favour) >= least_s * (1 - 1e-6) - 1e-9
    # Wider than on real graphs: on a path of three edges a twentieth of an edge is much.
    assert longest_by_hand(net, favour) <= least_s * 1.1 + 1e-9


def all_paths(net: ReaderPairs) -> list[tuple[list[int], list[int]]]:
    """Ops and edges of every path from an op without producers to one without readers."""
    begun: list[list[tuple[list[int], list[int]]]] = []
    for op in range(len(net.op_s)):
        edges = np.flatnonzero(net.dst == op).tolist()
        ways = [([*ops, op], [*used, e]) for e in edges for ops, used in begun[net.src[e]]]
        begun.append(ways if edges else [([op], [])])
    return [way for op in range(len(net.op_s)) if op not in net.src for way in begun[op]]


def soft_end_s(paths: list, length_s: np.ndarray, temperature_s: float) -> float:
    """The greatest, over the last ops, of the soft maximum of the paths that end there."""
    by_end: dict[int, list[float]] = {}
    for (ops, _), seconds in zip(paths, length_s.tolist(), strict=True):
        by_end.setdefault(ops[-1], []).append(seconds)
    return max(
        temperature_s * float(np.logaddexp.reduce(np.array(some) / temperature_s))
        for some in by_end.values()
    )


def descend_by_hand(net: ReaderPairs, num_rounds: int) -> np.ndarray:
    """The rounds of the descent, with flows from explicit paths."""
    favour = np.zeros(len(net.src))
    edge_s = (net.op_s.sum() + net.cost_s.sum()) / len(net.src)
    paths = all_paths(net)
    for index, temperature in enumerate(np.geomspace(2.0, 0.05, num_rounds)):
        temperature_s = temperature * edge_s
        sent_s = net.cost_s * (1 - favour)
        length_s = np.array(
            [net.op_s[ops].sum() + sum(sent_s[e] for e in edges) for ops, edges in paths]
        )
        part = np.exp((length_s - length_s.max()) / temperature_s)
        part /= part.sum()
        flow, through = np.zeros(len(net.src)), np.zeros(len(net.op_s))
        for (ops, edges), share in zip(paths, part, strict=True):
            flow[edges] += share
            through[ops] += share
        saved_s = np.where(through[net.dst] > 1e-9, flow * net.cost_s, 0.0)
        mean_edges = sum(s * len(edges) for (_, edges), s in zip(paths, part, strict=True))
        edge_s = soft_end_s(paths, length_s, temperature_s) / max(mean_edges, 1.0)
        chosen = greedy_edges(net, saved_s)
        step = 2 / (index + 2)
        touched = np.isin(net.src, net.src[chosen]) | np.isin(net.dst, net.dst[chosen])
        favour[touched] *= 1 - step
        favour[chosen] += step
    return favour


@given(nets(), st.integers(1, 3))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_descent_agrees_with_flows_over_explicit_paths(net, num_rounds):
    assume(len(net.src) > 0)
    # Equal weights would be told apart by rounding, which differs between the two.
    unequal = np.linspace(1, 1.3, len(net.src)) * np.maximum(net.cost_s, 0.1)
    net = make_net(net.op_s + 0.1, net.src, net.dst, unequal)
    favour = descended_favours(net, num_rounds)
    assert favour.tolist() == pytest.approx(descend_by_hand(net, num_rounds).tolist(), abs=1e-6)


@pytest.mark.parametrize("family", ["gnmt", "transformer", "layered", "series-parallel"])
@pytest.mark.parametrize("cluster", ["rtx2080x4", "dgx1-v100"])
def test_descent_comes_within_one_percent_of_the_linear_programme(family, cluster):
    net = net_of(make_problem(generate(family, 900, 3), cluster))
    least_s = longest_path_s(net, optimal_favours(net))
    reached_s = longest_path_s(net, descended_favours(net))
    assert least_s * (1 - 1e-6) <= reached_s <= 1.01 * least_s


@pytest.mark.skipif(not PUBLIC, reason="no ../shared/data beside the repository")
@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: "/".join(path.parts[-2:]))
def test_descent_is_near_the_linear_programme_on_public_graphs(path):
    net = net_of(make_problem(read_graph(path), "4xv100-32g"))
    least_s = longest_path_s(net, optimal_favours(net))
    reached_s = longest_path_s(net, descended_favours(net))
    assert least_s * (1 - 1e-6) <= reached_s <= 1.01 * least_s
