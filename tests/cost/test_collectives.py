"""Collectives: closed forms, and steps counted one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.collectives import rails_path, ring_all_reduce_s, ring_path
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
def test_the_ring_formula_equals_counted_steps(num_ranks, size):
    scatter_s, gather_s = ring_steps(num_ranks, size)
    found_s = ring_all_reduce_s(size, num_ranks, LATENCY_S, BANDWIDTH_BPS)
    assert found_s == pytest.approx(scatter_s + gather_s)


def test_one_rank_takes_no_time_and_many_ranks_approach_twice_the_size():
    assert ring_all_reduce_s(1e9, 1, 1e-6, 1e9) == 0
    assert ring_all_reduce_s(1e9, 10_000, 0.0, 1e9) == pytest.approx(2.0, rel=1e-3)


def test_formulas_broadcast_over_arrays():
    sizes, ranks = np.array([[1e6], [2e6], [3e6]]), np.array([2, 4, 8, 16])
    found_s = ring_all_reduce_s(sizes, ranks, LATENCY_S, BANDWIDTH_BPS)
    assert found_s.shape == (3, 4)
    assert found_s[2, 1] == ring_all_reduce_s(3e6, 4, LATENCY_S, BANDWIDTH_BPS)


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


@pytest.mark.parametrize(
    ("on", "times"), [("2xdgx-h100", 8), ("4xdgx-a100-80g", 8), ("dgx-h100", 1), ("2xrtx2080x4", 1)]
)
def test_rings_over_several_hosts_use_every_network_adapter(on, times):
    cluster = cluster_from_text(on)
    ranks = range(cluster.num_devices)
    one, rails = ring_path(cluster, ranks), rails_path(cluster, ranks)
    assert rails.latency_s == one.latency_s
    assert rails.bandwidth_bps == pytest.approx(times * one.bandwidth_bps)
    inside = ring_path(cluster, [i for i in ranks if cluster.devices[i].host == cluster.hosts[0]])
    assert rails.bandwidth_bps <= inside.bandwidth_bps * (1 + 1e-9)


def test_unequal_hosts_share_one_ring():
    cluster = cluster_from_text("2xdgx-h100")
    assert rails_path(cluster, range(12)) == ring_path(cluster, range(12))
