"""Sweeps give up the favours that no long path needs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from planners.favourite_nets import close, is_legal, longest_by_hand, net_from, nets_with_favours

from hocket.planners.placement.favourite_child import ReaderPairs, longest_path_s, needed_favours


@given(nets_with_favours())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_sweeps_are_legal_and_never_lengthen_the_longest_path(drawn):
    net, favour = drawn
    swept = needed_favours(net, favour)
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


def sweep_by_hand(net: ReaderPairs, given_favour: np.ndarray) -> np.ndarray:
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
    net: ReaderPairs, favour: list, op: int, own: Any, other: Any, far_s: list, least_s: float
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
    swept = np.where(net.is_free, 1.0, needed_favours(net, favour))
    assert swept.tolist() == pytest.approx(by_hand.tolist(), abs=1e-7)


def test_sweep_gives_up_favours_that_no_long_path_needs():
    # 0 -> 1 -> 3 is long; 0 -> 2 -> 3 and all that begins at 4 have time to spare.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (4, 5), (4, 6)]
    net = net_from([1, 9, 1, 1, 1, 1, 1], edges, [1.0] * 6)
    swept = needed_favours(net, np.array([0.98, 0.02, 0.98, 0.02, 0.5, 0.5]))
    assert swept.tolist() == pytest.approx([1, 0, 1, 0, 0, 0])


def test_sweep_leaves_edges_that_cost_nothing_as_long_as_they_are():
    # The edge that does cost something meets one that does not at either end.
    net = net_from([1, 10, 1, 10], [(0, 1), (0, 3), (2, 3)], [0.0, 1.0, 0.0])
    swept = needed_favours(net, np.array([0.0, 1.0, 0.0]))
    assert swept.tolist() == pytest.approx([0, 1, 0])


def test_sweep_stays_legal_where_very_different_edges_meet():
    # Each step of the search for the level leaves out a single edge, so that it is cut short.
    fan = 30
    edges = [(index, fan) for index in range(fan)]
    net = net_from([*[0.0] * fan, 1e60], edges, [64.0**index for index in range(fan)])
    swept = needed_favours(net, np.zeros(fan))
    assert is_legal(net, swept)
    assert longest_by_hand(net, swept) <= longest_by_hand(net, np.zeros(fan))
