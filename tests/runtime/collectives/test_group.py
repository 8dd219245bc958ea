"""``init_process_group("hocket")`` between processes: as torch would, and who dies is named."""

from __future__ import annotations

import os
import signal

import forked
import pytest
from runtime.collectives.ranks import collectives, endless, probed

from hocket.base.errors import RunError, UsageError
from hocket.hardware.files import read_cluster
from hocket.plan.make import find_cluster
from hocket.runtime.collectives.link_probe import probe_launched
from hocket.runtime.collectives.process_group import given_cluster


def test_collectives_and_data_parallel_training_are_those_of_torch() -> None:
    found = forked.answers(3, collectives)
    assert len(set(found)) == 1
    assert found[0].strip()


@pytest.mark.parametrize(
    ("victim", "signal_sent"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]
)
def test_a_rank_that_dies_or_stops_is_named(victim: int, signal_sent: signal.Signals) -> None:
    with forked.ranks(2, endless, HOCKET_CLUSTER="2xv100-16g") as ranks:
        for rank in ranks:
            assert rank.hear() == "running"
        os.kill(ranks[victim].process.pid, signal_sent)
        said = ranks[1 - victim].hear_failure()
        assert "rank 1 does not answer" in said if victim else "rank 0, which holds it" in said


def test_every_survivor_names_the_rank_that_died() -> None:
    # Rank 0 holds the store and ends on its own error: rank 1 must not take that for the cause.
    with forked.ranks(3, endless, HOCKET_CLUSTER="3xv100-16g") as ranks:
        for rank in ranks:
            assert rank.hear() == "running"
        os.kill(ranks[2].process.pid, signal.SIGKILL)
        for survivor in ranks[:2]:
            assert "rank 2 does not answer" in survivor.hear_failure()


def test_a_group_of_some_ranks_is_planned_on_their_own_devices(monkeypatch) -> None:
    monkeypatch.setenv("HOCKET_CLUSTER", "dgx1-v100")
    cluster = given_cluster([5, 2], find_cluster)
    assert cluster is not None
    assert cluster.device_names[:3] == ("gpu5", "gpu2", "gpu0")
    assert len(cluster.device_names) == 8
    with pytest.raises(UsageError, match="8 devices for 9 ranks"):
        given_cluster([0, 8], find_cluster)


def test_probe_writes_the_links_between_ranks(tmp_path) -> None:
    file = tmp_path / "links.toml"
    assert forked.answers(2, probed, str(file)) == [0, 0]
    cluster = read_cluster(file)
    assert cluster.device_names == ("rank0", "rank1")
    assert all(link.bandwidth_bps > 1e6 for link in cluster.links)


def test_ranks_that_have_no_place_to_meet_are_told(monkeypatch) -> None:
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunError, match=r"the ranks do not meet: .*MASTER_ADDR"):
        probe_launched()
