"""Clusters from measured rates: links of their own, shared ports, noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import NoFeasiblePlanError
from hocket.hardware.probed import Rates, cluster_of
from hocket.hardware.shorthand import cluster_from_text


def rates(alone, together) -> Rates:
    return Rates(np.array(alone), np.array(together), np.full(np.shape(alone), 1e-4))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e6, 3.75e6, 1e9]))
def test_noise_of_five_percent_gives_back_the_links_of_a_dgx1(seed, unit_bps) -> None:
    cluster = cluster_from_text("dgx1-v100")
    names = cluster.device_names
    true = np.zeros((8, 8))
    for link in cluster.links:
        if set(link.ends) <= set(names):
            a, b = (names.index(end) for end in link.ends)
            true[a, b] = true[b, a] = link.bandwidth_bps / 25e9 * unit_bps
    draw = np.random.default_rng(seed)
    star = 12 / 25 * unit_bps
    alone = np.where(true > 0, true, star) * draw.uniform(0.95, 1.0, (8, 8))
    # Three pairs of each rank go over the star and share its port.
    together = np.where(true > 0, true, star / 3) * draw.uniform(0.95, 1.0, (8, 8))
    np.fill_diagonal(alone, 0.0)
    np.fill_diagonal(together, 0.0)
    found = {link.ends: link.bandwidth_bps for link in cluster_of(rates(alone, together)).links}
    slowest = min(found.values())
    assert len(found) == 16
    for (a, b), rate_bps in found.items():
        wanted = true[int(a[4:]), int(b[4:])] / unit_bps
        assert rate_bps / slowest == pytest.approx(wanted)


def test_ranks_that_share_ports_are_a_star() -> None:
    alone, together = np.full((4, 4), 100.0), np.full((4, 4), 33.0)
    np.fill_diagonal(alone, 0.0)
    np.fill_diagonal(together, 0.0)
    cluster = cluster_of(rates(alone * 1e6, together * 1e6))
    assert cluster.switches == ("network",)
    assert {link.ends[0] for link in cluster.links} == set(cluster.device_names)
    assert {link.bandwidth_bps for link in cluster.links} == {99e6}


def test_a_pair_that_nothing_came_through_has_no_link() -> None:
    alone = np.array([[0, 5, 0], [5, 0, 5], [0, 5, 0]]) * 1e6
    cluster = cluster_of(rates(alone, alone))
    assert {link.ends for link in cluster.links} == {("rank0", "rank1"), ("rank1", "rank2")}


def test_directions_that_differ_much_are_two_links() -> None:
    alone = np.array([[0, 10, 10], [2, 0, 10], [10, 10, 0]]) * 1e6
    links = {link.name: link for link in cluster_of(rates(alone, alone)).links}
    assert links["rank0-to-rank1"].duplex == "one-way"
    assert links["rank0-to-rank1"].bandwidth_bps == 5 * links["rank1-to-rank0"].bandwidth_bps
    assert links["rank0-rank2"].duplex == "full"


def test_silence_is_told() -> None:
    with pytest.raises(NoFeasiblePlanError, match="no data arrived"):
        cluster_of(rates(np.zeros((2, 2)), np.zeros((2, 2))))
