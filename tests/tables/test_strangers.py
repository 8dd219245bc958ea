"""Strangers, other layouts and garbage change nothing and hurt nobody."""

from __future__ import annotations

import math
import socket
from contextlib import ExitStack

import numpy as np
import pytest

from hocket.base.errors import RunError
from hocket.tables import Layout, Node, ShardServer, TableSpec
from hocket.tables import route as route_module
from hocket.tables.address import client_port, shard_port
from hocket.tables.codec import decode, encode
from hocket.tables.core.message import COUNT, HEAD, KIND, UPDATES, Message
from hocket.tables.group import inside_ports

pytest.importorskip("zmq")

from tables.attack_rig import ONE, served, wait_until


@pytest.mark.parametrize("theirs", [
    Layout((TableSpec("w", 4, 3, staleness=1),)),
    Layout((TableSpec("w", 4, 2, staleness=1),), 1, 2),
])  # fmt: skip
def test_a_client_that_reads_another_layout_is_told(theirs):
    ports, (port,) = inside_ports(1, 1)
    with (
        served(ShardServer(theirs, 0, ports[0])),
        pytest.raises(RunError, match="not shard 0 of these tables"),
        Node(ONE, 0, port),
    ):
        pass


def test_shards_in_another_order_are_told():
    layout = Layout((TableSpec("w", 4, 2),), 2)
    ports, (port,) = inside_ports(2, 1)
    with ExitStack() as stack:
        for shard in (1, 0):
            stack.enter_context(served(ShardServer(layout, shard, ports[1 - shard])))
        with pytest.raises(RunError, match=r"not shard . of these tables"), Node(layout, 0, port):
            pass


def test_a_second_process_under_one_number_replaces_the_first_which_learns_of_it():
    shard = shard_port(ONE, 0, "tcp://127.0.0.1:0")
    with served(ShardServer(ONE, 0, shard)) as server:
        first = Node(ONE, 0, client_port(ONE, 0, [shard.address])).__enter__()
        first.workers[0]["w"].inc([0], [1, 1])
        first.flush()
        with Node(ONE, 0, client_port(ONE, 0, [shard.address])) as second:
            second.workers[0]["w"].inc([1], [1, 1])
            second.flush()
            # It is told at one of its next signs of life.
            with pytest.raises(RunError, match="taken the place of client 0"):
                wait_until(first, lambda: False)
            second.workers[0]["w"].inc([1], [1, 1])
        first.close()
        assert server.cells(0)[:2].tolist() == [[1, 1], [2, 2]]
    shard.close()


def test_garbage_changes_nothing_and_hurts_nobody():
    rng = np.random.default_rng(0)
    ports, (port,) = inside_ports(1, 1)
    server = ShardServer(ONE, 0, ports[0])
    good = Message(np.zeros(HEAD, np.int64), np.arange(4), np.ones((4, 2), np.float32))
    good.head[KIND], good.head[COUNT] = UPDATES, 4
    data = encode(good)
    extremes = np.array([-1, 0, 1, 2**31, 2**62, -(2**63), 2**63 - 1])
    for _ in range(1500):
        message = bytearray(data)
        place = int(rng.integers(HEAD)) * 8
        message[place : place + 8] = int(rng.choice(extremes)).to_bytes(8, "little", signed=True)
        if rng.random() < 0.5:
            del message[int(rng.integers(len(message))) :]
        if rng.random() < 0.5 and message:
            message[int(rng.integers(len(message)))] ^= 1 << int(rng.integers(8))
        if rng.random() < 0.5:
            message[15 * 8 : 16 * 8] = ONE.digest(0).to_bytes(8, "little")
        port.send(0, bytes(message))
        server.turn(0)
    assert (server.cells(0) == 0).all()
    port.lose()
    with served(server), Node(ONE, 0, port) as node:
        node.workers[0]["w"].inc([0], [1, 1])
        node.flush()
        assert server.cells(0)[0].tolist() == [1, 1]


def test_a_short_message_does_not_ask_for_much_memory():
    head = np.zeros(HEAD, np.int64)
    head[KIND], head[COUNT] = UPDATES, 10**6
    bomb = head.tobytes() + np.zeros(10**6, np.int32).tobytes() + b"\1" + bytes(2 * 10**6)
    with pytest.raises(RunError, match="names 1000000 rows of a table that has 10"):
        decode(bomb, 10, 60_000)


def test_rows_wider_than_columns_can_be_counted_travel_whole():
    head = np.zeros(HEAD, np.int64)
    head[KIND], head[COUNT] = UPDATES, 1
    cells = np.zeros((1, 3 * 30_000), np.float32)
    cells[0, 70_000] = 1
    found = decode(encode(Message(head, np.zeros(1, np.int64), cells)), 1, 90_000)
    np.testing.assert_array_equal(found.cells, cells)


def test_connections_of_strangers_do_not_disturb():
    shard = shard_port(ONE, 0, "tcp://127.0.0.1:0")
    host, port = shard.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
    huge = b"\x02" + (2**50).to_bytes(8, "big") + b"x"
    with ExitStack() as stack:
        stack.enter_context(served(ShardServer(ONE, 0, shard)))
        for number in range(200):
            one = stack.enter_context(socket.create_connection((host, int(port))))
            one.sendall((b"GET / HTTP/1.1\r\n\r\n", greeting[:20], greeting + huge)[number % 3])
        with Node(ONE, 0, client_port(ONE, 0, [shard.address])) as node:
            node.workers[0]["w"].inc([0], [1, 1])
            node.flush()
            assert node.workers[0]["w"].get(0).tolist() == [1, 1]
    shard.close()


def test_a_client_that_reads_nothing_does_not_fill_the_shards_memory(monkeypatch):
    monkeypatch.setattr(route_module, "MAX_IN_FLIGHT_BYTES", 5_000)
    layout = Layout((TableSpec("w", 4, 50, staleness=math.inf),), 1, 2)
    ports, (busy, idle) = inside_ports(1, 2)
    server = ShardServer(layout, 0, ports[0])
    with served(server):
        slow = Node(layout, 1, idle)
        with slow:
            slow.workers[0]["w"].get(np.arange(4))
        idle.lose()
        with Node(layout, 0, busy) as node:
            for _ in range(200):
                node.workers[0]["w"].inc(np.arange(4), np.ones((4, 50)))
                node.flush()
    assert sum(len(data) for _, data in idle._inbox if len(data) > 500) < 10_000
