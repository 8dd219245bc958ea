"""Tables as a program uses them: reads, changes, clocks, threads, shards that die."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from hocket.base.errors import RunError, UsageError
from hocket.tables import TableSpec, local_tables

MODES = ("ssp", "essp", "managed")


def in_threads(workers, work):
    """Run ``work(worker)`` for all workers at once; raises what any of them raised."""
    errors = []

    def guarded(worker):
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("staleness", [0, 2])
def test_reads_hold_old_changes_and_own_ones_and_the_end_holds_all(mode, staleness):
    num_clocks, width = 6, 4 * 6
    spec = TableSpec("counts", 7, width, staleness=staleness, mode=mode)
    with local_tables([spec], num_shards=2, num_clients=2, workers_per_client=2) as group:

        def work(worker):
            me = 2 * group.nodes.index(worker.node) + worker.number
            table = worker["counts"]
            for clock in range(num_clocks):
                seen = table.get(np.arange(7))
                old = seen.reshape(7, 4, num_clocks)[:, :, : max(0, clock - staleness)]
                assert (old == 1).all()
                assert (seen.reshape(7, 4, num_clocks)[:, me, :clock] == 1).all()
                change = np.zeros((7, width), np.float32)
                change[:, me * num_clocks + clock] = 1
                table.inc(np.arange(7), change)
                worker.clock()

        in_threads(group.workers, work)
        for node in group.nodes:
            node.flush()
        whole = np.empty((7, width), np.float32)
        for shard, server in enumerate(group.servers):
            whole[shard::2] = server.cells(0)
        np.testing.assert_array_equal(whole, 1)


def test_bulk_synchronous_gradient_descent_equals_the_serial_loop():
    # A read holds every change of the clocks before, and may hold changes of its own clock: those
    # wait here until both have read.
    both_read = threading.Barrier(2)
    spec = TableSpec("w", 5, 3, staleness=0)
    target = np.arange(15, dtype=np.float32).reshape(5, 3)
    expected = np.zeros((5, 3), np.float32)
    for _ in range(8):
        expected += 2 * np.float32(0.25) * (target - expected)
    with local_tables([spec], num_clients=2) as group:

        def work(worker):
            for _ in range(8):
                seen = worker["w"].get(np.arange(5))
                both_read.wait(60)
                worker["w"].inc(np.arange(5), np.float32(0.25) * (target - seen))
                worker.clock()

        in_threads(group.workers, work)
        for node in group.nodes:
            node.flush()
        np.testing.assert_allclose(group.servers[0].cells(0), expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_shard_comes_back_with_every_acknowledged_change(tmp_path, mode):
    spec = TableSpec("counts", 11, 4, staleness=1, mode=mode)
    with local_tables(
        [spec], num_shards=2, num_clients=2, checkpoints=tmp_path, timeout_s=120
    ) as group:

        def work(worker):
            for clock in range(30):
                table = worker["counts"]
                seen = table.get(np.arange(11))
                assert (seen >= 2 * max(0, clock - 1)).all()
                table.inc(np.arange(11), np.ones((11, 4)))
                worker.clock()
                if worker.node is group.nodes[0] and clock % 10 == 5:
                    group.kill_shard(clock % 2)
                    group.restart_shard(clock % 2)

        in_threads(group.workers, work)
        for node in group.nodes:
            node.flush()
        for server in group.servers:
            np.testing.assert_array_equal(server.cells(0), 60)


def test_a_shard_that_stays_away_is_named():
    spec = TableSpec("w", 4, 2, staleness=0)
    with local_tables([spec], num_shards=2) as group:
        (worker,) = group.workers
        group.kill_shard(1)
        worker["w"].get([0, 2])
        # Not before: the living shard may be slow to answer, too, on a busy machine.
        worker.node.timeout_s = 0.5
        with pytest.raises(RunError, match="shard 1 has sent nothing"):
            worker["w"].get([1])


def test_an_asynchronous_table_waits_for_nobody():
    spec = TableSpec("w", 3, 2, staleness=math.inf)
    with local_tables([spec], num_clients=2) as group:
        fast = group.workers[0]
        for _ in range(20):
            fast["w"].get([0, 1])
            fast["w"].inc([1], [[1, 1]])
            fast.clock()
        assert fast["w"].get(1).tolist() == [20, 20]
        slow = group.workers[1]
        fast.node.flush()
        assert slow["w"].get(1).tolist() == [20, 20]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_changes_that_are_not_finite_are_left_out_and_counted(bad):
    with local_tables([TableSpec("w", 3, 2, staleness=0)], num_clients=2) as group:
        first, second = group.workers
        first["w"].get([0, 1])
        first["w"].inc([0, 1], [[1, bad], [1, 1]])
        first.clock()
        second.clock()
        assert first["w"].get([0, 1]).tolist() == [[0, 0], [1, 1]]
        assert first["w"].refused == 1
        assert second["w"].get([0, 1]).tolist() == [[0, 0], [1, 1]]


def test_a_sum_that_overflows_is_refused_by_the_shard_and_repaired_in_the_cache():
    large = np.float32(3e38)
    with local_tables([TableSpec("w", 1, 1, staleness=0)], num_clients=2) as group:
        for worker in group.workers:
            worker["w"].get([0])
            worker["w"].inc([0], [[large]])
            worker.clock()
        found = [worker["w"].get(0)[0] for worker in group.workers]
        assert found[0] == found[1] == large
        assert group.servers[0].num_refused == 1


def test_wrong_use_is_told_in_words():
    with pytest.raises(UsageError, match="unknown mode 'esp'"):
        TableSpec("w", 3, 2, mode="esp")
    with pytest.raises(UsageError, match="must push"):
        TableSpec("w", 3, 2, mode="ssp", staleness=math.inf)
    with pytest.raises(UsageError, match="whole number"):
        TableSpec("w", 3, 2, staleness=0.5)
    with local_tables([TableSpec("w", 3, 2)]) as group:
        (worker,) = group.workers
        with pytest.raises(UsageError, match="no row 3"):
            worker["w"].get([0, 3])
        with pytest.raises(UsageError, match="2 rows but 1 changes"):
            worker["w"].inc([0, 1], [[1, 1]])
        with pytest.raises(UsageError, match=r"give numbers of shape \(1, 2\), not \(3,\)"):
            worker["w"].inc([0], [1, 1, 1])
        with pytest.raises(UsageError, match="unknown table 'v'"):
            worker["v"]


@pytest.mark.timeout(60)
def test_a_worker_ahead_of_its_process_gets_its_rows_over_a_busy_link(monkeypatch):
    """Shards know the clock of a process's slowest worker; what a faster one needs it says."""
    monkeypatch.setattr("hocket.tables.route.LinkUse.has_spare_time", lambda *_, **__: False)
    spec = TableSpec("w", 1, 1, staleness=2, mode="managed")
    with local_tables([spec], num_clients=2, workers_per_client=2) as group:
        (slow, fast), others = group.nodes[0].workers, group.nodes[1].workers
        for worker in (fast, *others):
            worker["w"].get([0])
        for worker in group.workers:
            worker["w"].inc([0], [[1.0]])
            worker.clock()
        for _ in range(2):
            fast.clock()
        assert fast["w"].get([0]) == 4.0
        assert slow.now == 1
