"""``init_process_group("hocket")`` between processes: as torch would, and who dies is named."""

from __future__ import annotations

import os
import signal

import pytest
from runtime.collectives.ranks import HERE, outputs, started

from hocket.hardware.files import read_cluster


def test_collectives_and_data_parallel_training_are_those_of_torch() -> None:
    with started([HERE, "collectives"], 3) as processes:
        found = outputs(processes)
    assert len(set(found)) == 1
    assert found[0].strip()


@pytest.mark.parametrize(
    ("victim", "signal_sent"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]
)
def test_a_rank_that_dies_or_stops_is_named(victim: int, signal_sent: signal.Signals) -> None:
    with started([HERE, "endless"], 2, HOCKET_CLUSTER="2xv100-16g") as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
        os.kill(processes[victim].pid, signal_sent)
        _, err = processes[1 - victim].communicate(timeout=60)
        assert processes[1 - victim].returncode != 0
        assert "rank 1 does not answer" in err if victim else "rank 0, which holds it" in err


def test_probe_writes_the_links_between_ranks(tmp_path) -> None:
    file = tmp_path / "links.toml"
    with started(["-m", "hocket", "probe", "-o", str(file)], 2) as processes:
        outputs(processes)
    cluster = read_cluster(file)
    assert cluster.device_names == ("rank0", "rank1")
    assert all(link.bandwidth_bps > 1e6 for link in cluster.links)
