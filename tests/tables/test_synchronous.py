"""Bulk-synchronous tables: reads hold exactly the changes of earlier clocks, whoever is faster."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from hocket.tables import TableSpec, local_tables


def steps(worker, number, seen, num_clocks, delays):
    for clock in range(num_clocks):
        table = worker["w"]
        for part in range(2):
            seen[number].append((clock, table.get([0, 3]).copy()))
            table.inc([0], [[1.0, number]])
            time.sleep(delays.random() * 0.01 * (number == clock % 3))
            seen[number].append((clock, table.get([0, 3]).copy()))
            del part
        assert worker.now == clock
        worker.clock()


@pytest.mark.parametrize("mode", ["ssp", "essp", "managed"])
@pytest.mark.parametrize(("clients", "each"), [(3, 1), (1, 3)])
def test_reads_hold_exactly_the_changes_of_earlier_clocks(mode, clients, each):
    spec = TableSpec("w", 5, 2, staleness=0, mode=mode)
    num, clocks = clients * each, 6
    with local_tables([spec], num_clients=clients, workers_per_client=each) as group:
        seen = [[] for _ in range(num)]
        threads = [
            threading.Thread(target=steps, args=(worker, k, seen, clocks, random.Random(k)))
            for k, worker in enumerate(group.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for node in group.nodes:
            node.flush()
        assert group.servers[0].cells(0)[0].tolist() == [2 * num * clocks, 2 * 3 * clocks]
    for own in seen:
        assert len(own) == 4 * clocks
        for clock, rows in own:
            assert rows.tolist() == [[2 * num * clock, 2 * 3 * clock], [0, 0]]


def test_synchronous_training_has_the_bits_of_one_process():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 4)).astype("f4"), rng.standard_normal(40).astype("f4")

    def gradient(w, part):
        return x[part].T @ (x[part] @ w - y[part])

    parts = np.array_split(np.arange(40), 2)
    expected = np.zeros(4, "f4")
    for _ in range(10):
        changes = [np.float32(-0.01) * gradient(expected, part) for part in parts]
        for change in changes:
            expected = expected + change
    spec = TableSpec("w", 1, 4, staleness=0)
    with local_tables([spec], num_clients=2) as group:

        def work(worker, part):
            for _ in range(10):
                w = worker["w"].get(0)
                worker["w"].inc(0, np.float32(-0.01) * gradient(w, part))
                worker.clock()

        pairs = zip(group.workers, parts, strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = group.workers[0]["w"].get(0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
