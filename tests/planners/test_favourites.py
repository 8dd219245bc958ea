"""Favourite children: the linear programme, the descent, the sweeps and the matching."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from simulate.problems import joined, problem_of, problems

from hocket.api import make_problem
from hocket.graph import GraphBuilder
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.planners.favourites import children, favourite_children, matching
from hocket.planners.favourites.descent import descended_favours
from hocket.planners.favourites.linear import optimal_favours
from hocket.planners.favourites.matching import match_favourites
from hocket.planners.favourites.net import Net, make_net, net_of
from hocket.planners.favourites.sweep import longest_path_s, swept_favours
from hocket.planners.tables import mean_transfer_s

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement"
PUBLIC = [
    *sorted((DATA / "dnn-partitioning").glob("throughput-inputs/*/*training.json")),
    *sorted((DATA / "pipedream").rglob("graph.txt")),
]

OP_S = st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 0.1])
COST_S = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 5.0, 0.3])


@st.composite
def nets(draw: Any, max_ops: int = 7, max_edges: int = 9) -> Net:
    """Small nets with free edges, edges that cost nothing and ops that take no time."""
    num_ops = draw(st.integers(1, max_ops))
    pairs = [(src, dst) for dst in range(num_ops) for src in range(dst)]
    chosen = st.lists(st.sampled_from(pairs), unique=True, max_size=max_edges)
    edges = draw(chosen.map(lambda some: sorted(some, key=lambda e: (e[1], e[0])))) if pairs else []
    op_s = draw(st.lists(OP_S, min_size=num_ops, max_size=num_ops))
    cost_s = draw(st.lists(COST_S, min_size=len(edges), max_size=len(edges)))
    return net_from(op_s, edges, cost_s)


def net_from(op_s: list[float], edges: list[tuple[int, int]], cost_s: list[float]) -> Net:
    src, dst = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    return make_net(np.array(op_s), src, dst, np.array(cost_s, dtype=np.float64))


@st.composite
def nets_with_favours(draw: Any) -> tuple[Net, np.ndarray]:
    """A net and legal favours, some of them whole."""
    net = draw(nets(max_edges=14))
    favour, used = np.zeros(len(net.src)), np.zeros((2, len(net.op_s)))
    for edge in draw(st.permutations(range(len(net.src)))):
        src, dst = net.src[edge], net.dst[edge]
        room = 1 - max(used[0, src], used[1, dst])
        favour[edge] = room * draw(st.sampled_from([0.0, 1.0, 0.5, 0.3]))
        used[0, src] += favour[edge]
        used[1, dst] += favour[edge]
    return net, favour


def longest_by_hand(net: Net, favour: Any) -> float:
    end_s = list(net.op_s)
    for src, dst, cost_s, part in zip(net.src, net.dst, net.cost_s, favour, strict=True):
        end_s[dst] = max(end_s[dst], end_s[src] + cost_s * (1 - part) + net.op_s[dst])
    return max(end_s)


def least_by_hand(net: Net) -> float:
    """The programme as it is published: x = 1 - favour, a row for every op."""
    num_ops, num_edges = len(net.op_s), len(net.src)
    rows, limits = [], []

    def row(limit: float, entries: list[tuple[int, float]]) -> None:
        values = np.zeros(num_edges + num_ops + 1)
        for column, value in entries:
            values[column] += value
        rows.append(values)
        limits.append(limit)

    for edge in range(num_edges):
        src, dst = num_edges + int(net.src[edge]), num_edges + int(net.dst[edge])
        row(-net.op_s[net.src[edge]], [(src, 1), (dst, -1), (edge, net.cost_s[edge])])
    for op in range(num_ops):
        row(-net.op_s[op], [(num_edges + op, 1), (num_edges + num_ops, -1)])
        for ends in (net.src, net.dst):
            mine = np.flatnonzero(ends == op).tolist()
            row(1 - len(mine), [(edge, -1) for edge in mine])
    goal = np.zeros(num_edges + num_ops + 1)
    goal[-1] = 1
    bounds = [(0, 1)] * num_edges + [(0, None)] * (num_ops + 1)
    found = linprog(goal, A_ub=np.array(rows), b_ub=limits, bounds=bounds)
    assert found.status == 0
    return float(found.fun)


def least_whole(net: Net) -> float:
    """The least longest path over all matchings."""
    best = math.inf
    for favour in product((0, 1), repeat=len(net.src)):
        if is_legal(net, np.array(favour, dtype=np.float64)):
            best = min(best, longest_by_hand(net, favour))
    return best


def is_legal(net: Net, favour: np.ndarray) -> bool:
    inside = bool((favour >= 0).all() and (favour <= 1 + 1e-9).all())
    return inside and all(
        np.bincount(ends, favour, 1).max() <= 1 + 1e-6 for ends in (net.src, net.dst)
    )


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def pairs_of(child: np.ndarray) -> set[tuple[int, int]]:
    return {(op, int(c)) for op, c in enumerate(child) if c >= 0}


def assert_matching(child: np.ndarray, net: Net) -> None:
    favoured = pairs_of(child)
    assert favoured <= set(zip(net.src.tolist(), net.dst.tolist(), strict=True))
    assert len({c for _, c in favoured}) == len(favoured)


# ── the published cases ──────────────────────────────────────────────────────────────────────


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


# ── relaxations ──────────────────────────────────────────────────────────────────────────────


@given(nets())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_linear_programme_is_legal_and_least(net):
    favour = optimal_favours(net)
    assert is_legal(net, favour)
    assert longest_by_hand(net, favour) == close(least_by_hand(net))
    assert longest_by_hand(net, favour) <= least_whole(net) * (1 + 1e-6) + 1e-9


@given(nets(max_edges=14))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_descent_is_legal_and_near_the_least(net):
    least_s = least_by_hand(net)
    favour = descended_favours(net)
    swept = swept_favours(net, favour)
    assert is_legal(net, favour)
    assert is_legal(net, swept)
    assert longest_by_hand(net, swept) >= least_s * (1 - 1e-6) - 1e-9
    # Wider than on real graphs: on a path of three edges a twentieth of an edge is much.
    assert longest_by_hand(net, swept) <= least_s * 1.03 + 1e-9


def greedy_edges(net: Net, weight: Any) -> list[int]:
    """Edges from the heaviest down, ties in order."""
    begun, ended, chosen = set(), set(), []
    for edge in sorted(range(len(net.src)), key=lambda e: (-weight[e], e)):
        src, dst = int(net.src[edge]), int(net.dst[edge])
        if weight[edge] > 0 and src not in begun and dst not in ended:
            begun.add(src)
            ended.add(dst)
            chosen.append(edge)
    return chosen


def all_paths(net: Net) -> list[tuple[list[int], list[int]]]:
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


def descend_by_hand(net: Net, num_rounds: int) -> np.ndarray:
    """The rounds of the descent, with flows from explicit paths."""
    favour = net.is_free.astype(np.float64)
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


# ── sweeps ───────────────────────────────────────────────────────────────────────────────────


@given(nets_with_favours())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_sweeps_are_legal_and_never_lengthen_the_longest_path(drawn):
    net, favour = drawn
    swept = swept_favours(net, favour)
    assert is_legal(net, swept)
    assert longest_path_s(net, swept) == close(longest_by_hand(net, swept))
    assert longest_by_hand(net, swept) <= longest_by_hand(net, favour) * (1 + 1e-9) + 1e-12


def level_by_hand(edges: list[tuple[float, float, float]], at_least_s: float) -> float:
    """The lowest level to which (length, cost, room) can be cut with favours of 1 in all."""
    level_s = max([at_least_s, 0.0, *(length - cost for length, cost, _ in edges)])
    # Between two lengths the favour that is needed falls linearly: try every set of the longest.
    longest_first = sorted((edge for edge in edges if edge[1] > 0), reverse=True)
    for count in range(1, len(longest_first) + 1):
        some = longest_first[:count]
        rate = sum(1 / cost for _, cost, _ in some)
        level_s = max(level_s, (sum(length / cost for length, cost, _ in some) - 1) / rate)
    return level_s


def sweep_by_hand(net: Net, given_favour: np.ndarray) -> np.ndarray:
    favour, num_ops = given_favour.tolist(), len(net.op_s)
    far_s = {"head": [0.0] * num_ops, "tail": [0.0] * num_ops}
    for op in range(num_ops):
        before = [
            far_s["head"][net.src[edge]] + net.cost_s[edge] * (1 - favour[edge])
            for edge in np.flatnonzero(net.dst == op)
        ]
        far_s["head"][op] = net.op_s[op] + max(before, default=0.0)
    for _ in range(10):
        target_s = max(far_s["head"]) * 0.997
        for op in range(num_ops - 1, -1, -1):
            least_s = target_s - far_s["head"][op]
            divide_by_hand(net, favour, op, net.src, net.dst, far_s["tail"], least_s)
        for op in range(num_ops):
            least_s = target_s - far_s["tail"][op]
            divide_by_hand(net, favour, op, net.dst, net.src, far_s["head"], least_s)
    return np.where(net.is_free, 1.0, favour)


def divide_by_hand(
    net: Net, favour: list, op: int, own: Any, other: Any, far_s: list, least_s: float
) -> None:
    mine = np.flatnonzero(own == op).tolist()
    edges = []
    for edge in mine:
        rivals = np.flatnonzero(other == other[edge]).tolist()
        room = 1 - sum(favour[e] for e in rivals if e != edge)
        edges.append((net.cost_s[edge] + far_s[other[edge]], net.cost_s[edge], max(room, 0.0)))
    level_s, left_s = level_by_hand(edges, least_s), 0.0
    for edge, (length_s, cost_s, room) in zip(mine, edges, strict=True):
        needed = max(length_s - level_s, 0.0) / cost_s if cost_s > 0 else 0.0
        favour[edge] = min(needed, room)
        left_s = max(left_s, length_s - cost_s * favour[edge])
    far_s[op] = net.op_s[op] + left_s


@given(nets_with_favours())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_sweeps_agree_with_plain_python(drawn):
    net, favour = drawn
    by_hand = sweep_by_hand(net, favour)
    assert swept_favours(net, favour).tolist() == pytest.approx(by_hand.tolist(), abs=1e-7)


def test_sweep_gives_up_favours_that_no_long_path_needs():
    # 0 -> 1 -> 3 is long; 0 -> 2 -> 3 and all that begins at 4 have time to spare.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (4, 5), (4, 6)]
    net = net_from([1, 9, 1, 1, 1, 1, 1], edges, [1.0] * 6)
    swept = swept_favours(net, np.array([0.98, 0.02, 0.98, 0.02, 0.5, 0.5]))
    assert swept.tolist() == pytest.approx([1, 0, 1, 0, 0, 0])


def test_sweep_leaves_edges_that_cost_nothing_as_long_as_they_are():
    # The edge that does cost something meets one that does not at either end.
    net = net_from([1, 10, 1, 10], [(0, 1), (0, 3), (2, 3)], [0.0, 1.0, 0.0])
    swept = swept_favours(net, np.array([0.0, 1.0, 0.0]))
    assert swept.tolist() == pytest.approx([0, 1, 0])


def test_sweep_stays_legal_where_very_different_edges_meet():
    # Each step of the search for the level leaves out a single edge, so that it is cut short.
    fan = 30
    edges = [(index, fan) for index in range(fan)]
    net = net_from([*[0.0] * fan, 1e60], edges, [64.0**index for index in range(fan)])
    swept = swept_favours(net, np.zeros(fan))
    assert is_legal(net, swept)
    assert longest_by_hand(net, swept) <= longest_by_hand(net, np.zeros(fan))


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
        patch.setattr(matching, "_MAX_EXACT_EDGES", -1)
        child = match_favourites(net, favour)
    assert_matching(child, net)
    is_chosen = child[net.src] == net.dst
    assert is_chosen[favour == 1].all()
    weight = favour * net.cost_s
    assert np.flatnonzero(is_chosen & (weight > 0)).tolist() == sorted(greedy_edges(net, weight))


def test_displaced_reader_takes_its_place_among_equals(monkeypatch):
    # Op 4 displaces op 2 at op 0; at op 1 the edge to op 2 stands before the equal one to op 3.
    net = net_from([1.0] * 5, [(0, 2), (1, 2), (1, 3), (0, 4)], [2.0, 1.0, 1.0, 3.0])
    monkeypatch.setattr(matching, "_MAX_EXACT_EDGES", -1)
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


@pytest.mark.parametrize("family", ["gnmt", "transformer", "layered", "series-parallel"])
@pytest.mark.parametrize("cluster", ["rtx2080x4", "dgx1-v100"])
def test_descent_comes_within_half_a_percent_of_the_linear_programme(family, cluster):
    net = net_of(make_problem(generate(family, 900, 3), cluster))
    least_s = longest_path_s(net, optimal_favours(net))
    reached_s = longest_path_s(net, swept_favours(net, descended_favours(net)))
    assert least_s * (1 - 1e-6) <= reached_s <= 1.005 * least_s


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


@pytest.mark.skipif(not PUBLIC, reason="no ../shared/data beside the repository")
@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: "/".join(path.parts[-2:]))
def test_descent_is_near_the_linear_programme_on_public_graphs(path):
    net = net_of(make_problem(read_graph(path), "4xv100-32g"))
    least_s = longest_path_s(net, optimal_favours(net))
    reached_s = longest_path_s(net, swept_favours(net, descended_favours(net)))
    assert least_s * (1 - 1e-6) <= reached_s <= 1.005 * least_s
