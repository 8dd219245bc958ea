"""Small nets with favours, and what is right about them by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import linprog

from hocket.planners.tables import ReaderPairs, make_net

OP_S = st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 0.1])
COST_S = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 5.0, 0.3])


@st.composite
def nets(draw: Any, max_ops: int = 7, max_edges: int = 9) -> ReaderPairs:
    """Small nets with free edges, edges that cost nothing and ops that take no time."""
    num_ops = draw(st.integers(1, max_ops))
    pairs = [(src, dst) for dst in range(num_ops) for src in range(dst)]
    chosen = st.lists(st.sampled_from(pairs), unique=True, max_size=max_edges)
    edges = draw(chosen.map(lambda some: sorted(some, key=lambda e: (e[1], e[0])))) if pairs else []
    op_s = draw(st.lists(OP_S, min_size=num_ops, max_size=num_ops))
    cost_s = draw(st.lists(COST_S, min_size=len(edges), max_size=len(edges)))
    return net_from(op_s, edges, cost_s)


def net_from(op_s: list[float], edges: list[tuple[int, int]], cost_s: list[float]) -> ReaderPairs:
    src, dst = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    return make_net(np.array(op_s), src, dst, np.array(cost_s, dtype=np.float64))


def longest_by_hand(net: ReaderPairs, favour: Any) -> float:
    end_s = list(net.op_s)
    for src, dst, cost_s, part in zip(net.src, net.dst, net.cost_s, favour, strict=True):
        end_s[dst] = max(end_s[dst], end_s[src] + cost_s * (1 - part) + net.op_s[dst])
    return max(end_s)


def is_legal(net: ReaderPairs, favour: np.ndarray) -> bool:
    inside = bool((favour >= 0).all() and (favour <= 1 + 1e-9).all())
    return inside and all(
        np.bincount(ends, favour, 1).max() <= 1 + 1e-6 for ends in (net.src, net.dst)
    )


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def pairs_of(child: np.ndarray) -> set[tuple[int, int]]:
    return {(op, int(c)) for op, c in enumerate(child) if c >= 0}


def assert_matching(child: np.ndarray, net: ReaderPairs) -> None:
    favoured = pairs_of(child)
    assert favoured <= set(zip(net.src.tolist(), net.dst.tolist(), strict=True))
    assert len({c for _, c in favoured}) == len(favoured)


def least_by_hand(net: ReaderPairs) -> float:
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
