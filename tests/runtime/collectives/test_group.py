"""``init_process_group("hocket")`` between processes: as torch would, and who dies is named."""

from __future__ import annotations

import os
import signal
import time

import pytest
from runtime.collectives.ranks import HERE, outputs, started

from hocket.hardware.files import read_cluster


def test_collectives_and_data_parallel_training_are_those_of_torch() -> None:
    with started([HERE, "collectives"], 3) as processes:
        found = outputs(processes)
    assert len(set(found)) == 1
    assert found[0].strip()


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named_and_all_end(signal_sent: signal.Signals) -> None:
    with started([HERE, "endless"], 3, HOCKET_CLUSTER="3xv100-16g") as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
        os.kill(processes[2].pid, signal_sent)
        start_s = time.monotonic()
        for process in processes[:2]:
            _, err = process.communicate(timeout=60)
            assert process.returncode != 0
            assert "rank 2 does not answer" in err
        assert time.monotonic() - start_s < 20  # 8 s on a machine with nothing else to do


def test_probe_writes_the_links_between_ranks(tmp_path) -> None:
    file = tmp_path / "links.toml"
    with started(["-m", "hocket", "probe", "-o", str(file)], 3) as processes:
        outputs(processes)
    cluster = read_cluster(file)
    assert cluster.device_names == ("rank0", "rank1", "rank2")
    assert all(link.bandwidth_bps > 1e6 for link in cluster.links)
