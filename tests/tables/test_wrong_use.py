"""Tables that are used wrongly say so, and odd values are taken as they are meant."""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import pytest

from hocket.base.errors import MissingExtraError, RunError, UsageError
from hocket.tables import Node, ShardServer, TableSpec, local_tables
from hocket.tables.address import client_port, shard_port
from hocket.tables.group import inside_ports

pytest.importorskip("zmq")

from tables.attack_rig import ONE, served


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_rows": 3.5}, "num_rows is a whole number"),
        ({"num_rows": True}, "num_rows is a whole number"),
        ({"width": 0}, "4 x 0 is not possible"),
        ({"staleness": "1"}, "staleness is a number"),
        ({"staleness": -1}, "staleness -1 is not possible"),
        ({"staleness": math.nan}, "staleness nan is not possible"),
        ({"rate": math.nan}, "rate nan"),
        ({"curvature": 0}, "curvature 0"),
    ],
)
def test_impossible_tables_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        TableSpec(**{"name": "w", "num_rows": 4, "width": 2, **fields})


def test_a_staleness_beyond_all_clocks_waits_for_nobody():
    assert TableSpec("w", 4, 2, staleness=1e300).need(10**9) == 0


def test_odd_rows_and_changes_are_told_or_taken_as_meant():
    spec = TableSpec("w", 6, 2)
    with local_tables([spec], num_shards=2) as group:
        (worker,) = group.workers
        table = worker["w"]
        for rows in ([-1], [2**63], [2**64], [-(2**63)], [6]):
            with pytest.raises(UsageError, match=r"there is no row|whole numbers"):
                table.get(rows)
        for rows in ([0.0], [[0], [1, 2]], ["a"], [True, False], None):
            with pytest.raises(UsageError, match="whole numbers"):
                table.get(rows)
        for change in (np.ones((2, 3)), np.ones((3, 2, 1)), np.ones(5), []):
            with pytest.raises(UsageError, match="3 rows but"):
                table.inc([0, 1, 2], change)
        for change in (np.ones((3, 2)) * 1j, [["a", "b"]] * 3):
            with pytest.raises(UsageError, match="changes are numbers"):
                table.inc([0, 1, 2], change)
        with pytest.raises(UsageError, match="different lengths"):
            table.inc([0, 1], [[1, 2], [3]])
        assert table.get([]).shape == (0, 2)
        table.inc([], [])
        table.get(np.arange(6))
        table.inc([5, 5, 0], np.arange(12.0).reshape(2, 6)[:, ::2].T)  # not contiguous, one twice
        table.inc([1], [[1e300, 0]])  # more than 32 bits hold
        assert table.get([5, 0, 1]).tolist() == [[2, 14], [4, 10], [0, 0]]
        assert table.refused == 1


def test_a_gradient_whose_square_is_no_number_is_refused_and_the_row_goes_on():
    spec = TableSpec("w", 1, 1, staleness=1, is_adaptive=True)
    with local_tables([spec]) as group:
        (worker,) = group.workers
        worker["w"].get([0])
        worker["w"].inc([0], [[1e25]])
        assert worker["w"].refused == 1
        worker["w"].inc([0], [[1.0]])
        worker.clock()
        assert worker["w"].get([0])[0, 0] < 0
        # A gradient whose square the row's sum cannot take any more is refused by the shard.
        group.servers[0].states[0].hidden[:] = 3.4e38
        worker["w"].inc([0], [[1e18]])
        assert worker["w"].refused == 1
    assert group.servers[0].num_refused == 1
    assert np.isfinite(group.servers[0].states[0].cells).all()


def test_tables_that_were_closed_say_so():
    ports, (port,) = inside_ports(1, 1)
    with served(ShardServer(ONE, 0, ports[0])):
        with Node(ONE, 0, port) as node:
            table = node.workers[0]["w"]
            table.get([0])
        for use in (lambda: table.get([0]), lambda: table.inc([0], [1, 1]), node.workers[0].clock):
            with pytest.raises(RunError, match="the tables were closed"):
                use()


def test_a_client_that_finds_no_shard_leaves_no_thread_behind():
    _, (port,) = inside_ports(1, 1)
    with (
        pytest.raises(RunError, match="shard 0 has sent nothing"),
        Node(ONE, 0, port, timeout_s=0.1),
    ):
        pass
    assert "tables 0" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("client", "workers", "timeout_s"), [(1, 1, 60), (-1, 1, 60), (0, 0, 60), (0, 1, math.nan)]
)
def test_a_client_that_the_layout_does_not_name_is_refused(client, workers, timeout_s):
    _, (port,) = inside_ports(1, 1)
    with pytest.raises(UsageError, match="clients are 0 to 0"):
        Node(ONE, client, port, num_workers=workers, timeout_s=timeout_s)


def test_without_zeromq_its_ports_name_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    for use in (shard_port, lambda layout, client, at: client_port(layout, client, [at])):
        with pytest.raises(MissingExtraError, match="needs zmq"):
            use(ONE, 0, "tcp://127.0.0.1:0")
