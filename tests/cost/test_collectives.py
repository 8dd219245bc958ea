"""Collectives: closed forms, and steps counted one by one."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.cost.collectives import (
    all_gather_s,
    all_to_all_s,
    broadcast_s,
    chain_broadcast_s,
    hierarchical_all_reduce_s,
    reduce_scatter_s,
    ring_all_reduce_s,
    ring_path,
    tree_all_reduce_s,
)
from hocket.hardware import cluster_from_text

LATENCY_S, BANDWIDTH_BPS = 3e-6, 2e9
ranks_and_sizes = given(num_ranks=st.integers(1, 9), size=st.integers(0, 5).map(lambda x: x * 840))
quick = settings(derandomize=True, deadline=None, max_examples=40)


def step_s(size_bytes: float) -> float:
    return LATENCY_S + size_bytes / BANDWIDTH_BPS


def ring_steps(num_ranks: int, size: float) -> tuple[float, float]:
    """Time of the scatter-reduce and of the gather phase, by moving every chunk around."""
    held = [[{rank} for _ in range(num_ranks)] for rank in range(num_ranks)]
    phases = []
    for shift in (0, 1):
        elapsed_s = 0.0
        for step in range(num_ranks - 1):
            sent = [
                (
                    rank,
                    (rank + shift - step) % num_ranks,
                    set(held[rank][(rank + shift - step) % num_ranks]),
                )
                for rank in range(num_ranks)
            ]
            for rank, chunk, content in sent:
                held[(rank + 1) % num_ranks][chunk] |= content
            elapsed_s += step_s(size / num_ranks)
        phases.append(elapsed_s)
    assert all(chunk == set(range(num_ranks)) for row in held for chunk in row)
    return phases[0], phases[1]


@ranks_and_sizes
@quick
def test_ring_formulas_equal_counted_steps(num_ranks, size):
    scatter_s, gather_s = ring_steps(num_ranks, size)
    arguments = (size, num_ranks, LATENCY_S, BANDWIDTH_BPS)
    assert reduce_scatter_s(*arguments) == pytest.approx(scatter_s)
    assert all_gather_s(*arguments) == pytest.approx(gather_s)
    assert ring_all_reduce_s(*arguments) == pytest.approx(scatter_s + gather_s)


@ranks_and_sizes
@quick
def test_tree_formulas_equal_counted_rounds(num_ranks, size):
    informed, rounds = {0}, 0
    while len(informed) < num_ranks:
        informed |= {rank + 2**rounds for rank in informed if rank + 2**rounds < num_ranks}
        rounds += 1
    arguments = (size, num_ranks, LATENCY_S, BANDWIDTH_BPS)
    assert broadcast_s(*arguments) == pytest.approx(rounds * step_s(size))
    assert tree_all_reduce_s(*arguments) == pytest.approx(2 * rounds * step_s(size))


@given(num_ranks=st.integers(1, 6), num_chunks=st.integers(1, 6))
@quick
def test_chain_broadcast_equals_counted_steps(num_ranks, num_chunks):
    size = 6000.0
    has = [num_chunks] + [0] * (num_ranks - 1)
    steps = 0
    while min(has) < num_chunks:
        has = [has[0]] + [mine + (before > mine) for before, mine in itertools.pairwise(has)]
        steps += 1
    wanted_s = steps * step_s(size / num_chunks)
    found_s = chain_broadcast_s(size, num_ranks, LATENCY_S, BANDWIDTH_BPS, num_chunks)
    assert found_s == pytest.approx(wanted_s)


@ranks_and_sizes
@quick
def test_all_to_all_equals_counted_rounds(num_ranks, size):
    todo = {(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b}
    rounds = 0
    for shift in range(1, num_ranks):
        todo -= {(rank, (rank + shift) % num_ranks) for rank in range(num_ranks)}
        rounds += 1
    assert not todo
    found_s = all_to_all_s(size, num_ranks, LATENCY_S, BANDWIDTH_BPS)
    assert found_s == pytest.approx(rounds * step_s(size / num_ranks))


def test_one_rank_takes_no_time_and_many_ranks_approach_twice_the_size():
    for function in (ring_all_reduce_s, tree_all_reduce_s, broadcast_s, all_to_all_s):
        assert function(1e9, 1, 1e-6, 1e9) == 0
    assert chain_broadcast_s(1e9, 1, 1e-6, 1e9, 4) == 0
    assert ring_all_reduce_s(1e9, 10_000, 0.0, 1e9) == pytest.approx(2.0, rel=1e-3)


def test_broadcast_rounds_are_exact_at_powers_of_two():
    exponents = np.arange(1, 40)
    for offset, extra in ((0, 0), (1, 1)):
        rounds = broadcast_s(0, 2.0**exponents + offset, 1.0, 1.0)
        assert (rounds == exponents + extra).all()


def test_tree_beats_ring_for_small_and_loses_for_large_messages():
    sizes = np.array([1e3, 1e9])
    ring_s = ring_all_reduce_s(sizes, 64, 5e-6, 1e10)
    tree_s = tree_all_reduce_s(sizes, 64, 5e-6, 1e10)
    assert list(tree_s < ring_s) == [True, False]


def test_hierarchical_all_reduce_is_the_sum_of_its_parts():
    found_s = hierarchical_all_reduce_s(8e8, 8, 4, (2e-6, 5e-6), (300e9, 25e9))
    inside_s = 2 * 7 * (2e-6 + 1e8 / 300e9)
    between_s = 2 * 3 * (5e-6 + 0.25e8 / 25e9)
    assert found_s == pytest.approx(inside_s + between_s)
    one_host_s = hierarchical_all_reduce_s(8e8, 8, 1, (2e-6, 5e-6), (300e9, 25e9))
    assert one_host_s == ring_all_reduce_s(8e8, 8, 2e-6, 300e9)
    one_each_s = hierarchical_all_reduce_s(8e8, 1, 8, (2e-6, 5e-6), (300e9, 25e9))
    assert one_each_s == ring_all_reduce_s(8e8, 8, 5e-6, 25e9)


def test_formulas_broadcast_over_arrays():
    sizes, ranks = np.array([[1e6], [2e6], [3e6]]), np.array([2, 4, 8, 16])
    found_s = ring_all_reduce_s(sizes, ranks, LATENCY_S, BANDWIDTH_BPS)
    assert found_s.shape == (3, 4)
    assert found_s[2, 1] == ring_all_reduce_s(3e6, 4, LATENCY_S, BANDWIDTH_BPS)


@pytest.mark.parametrize("arguments", [(1, 0, 0, 1), (-1, 2, 0, 1), (1, 2, -1, 1), (1, 2, 0, 0)])
def test_formulas_refuse_impossible_arguments(arguments):
    with pytest.raises(UsageError):
        ring_all_reduce_s(*arguments)


def test_ring_path_follows_the_links_of_the_machine():
    cluster = cluster_from_text("dgx1-v100")
    double_ring = ring_path(cluster, [0, 3, 2, 1, 5, 6, 7, 4])
    assert double_ring.bandwidth_bps == 50e9
    assert double_ring.latency_s == pytest.approx(2e-6)
    assert ring_path(cluster, range(8)).bandwidth_bps < 25e9
    assert ring_path(cluster, [0, 1]).bandwidth_bps == 25e9


def test_ring_path_shares_a_bus_among_all_senders():
    cluster = cluster_from_text("rtx2080x4")
    alone_bps = float(cluster.routes.bandwidth_bps[0, 1])
    assert ring_path(cluster, [0, 1, 2, 3]).bandwidth_bps == pytest.approx(alone_bps / 4)
    assert math.isclose(ring_path(cluster, [0, 1]).bandwidth_bps, alone_bps / 2)


@pytest.mark.parametrize("ranks", [[], [0], [0, 0], [0, 9], [-1, 0]])
def test_ring_path_refuses_wrong_devices(ranks):
    with pytest.raises(UsageError):
        ring_path(cluster_from_text("4xt4"), ranks)
