"""Clients, shards and connections that vanish are named, and nothing is lost."""

from __future__ import annotations

import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from hocket.base.errors import RunError
from hocket.tables import Layout, Node, ShardServer, TableSpec, local_tables
from hocket.tables.address import client_port, shard_port
from hocket.tables.group import inside_ports

pytest.importorskip("zmq")

from tables.attack_rig import ONE, refused, served


@pytest.mark.parametrize("mode", ["ssp", "managed"])
def test_a_client_whose_clock_is_waited_for_and_that_is_gone_is_named(mode):
    layout = Layout((TableSpec("w", 4, 2, staleness=0, mode=mode),), 1, 2)
    ports, clients = inside_ports(1, 2)
    with served(ShardServer(layout, 0, ports[0])):
        with Node(layout, 1, clients[1]) as gone:
            gone.workers[0].clock()
        with Node(layout, 0, clients[0]) as node:
            (worker,) = node.workers
            worker.clock()
            worker["w"].get([0])
            worker.clock()
            node.timeout_s = 1
            refused(lambda: worker["w"].get([0]), "client 1 has sent .* clock 1, .* its clock 2")
            node.timeout_s = 60


def test_a_shard_that_is_gone_is_named_to_workers_that_wait_for_nobody():
    ports, (port,) = inside_ports(1, 1)
    layout = Layout((TableSpec("w", 4, 2, staleness=math.inf),))
    with served(ShardServer(layout, 0, ports[0])):
        node = Node(layout, 0, port).__enter__()
        node.workers[0]["w"].get([0])

    def work():
        while True:
            node.workers[0]["w"].inc([0], [1, 1])
            node.workers[0].clock()
            time.sleep(0.01)

    node.timeout_s = 0.3
    with pytest.raises(RunError, match="shard 0 has sent nothing"):
        work()
    node.close()


def test_a_worker_whose_thread_ended_is_named():
    with local_tables([TableSpec("w", 4, 2, staleness=0)], workers_per_client=2) as group:
        ended, waiting = group.workers
        thread = threading.Thread(target=ended["w"].get, args=([0],))
        thread.start()
        thread.join()
        waiting.clock()
        group.nodes[0].timeout_s = 1
        refused(lambda: waiting["w"].get([0]), "thread of worker 0 has ended at clock 0")
        group.nodes[0].timeout_s = 60


def test_a_shard_that_comes_back_without_what_was_safe_is_named():
    ports, (port,) = inside_ports(1, 1)
    with served(ShardServer(ONE, 0, ports[0])):
        node = Node(ONE, 0, port).__enter__()
        node.workers[0]["w"].inc([0], [1, 1])
        node.flush()
    with served(ShardServer(ONE, 0, ports[0])):
        node.workers[0].clock()
        with pytest.raises(RunError, match="came back without changes"):
            node.flush()
        node.close()


class Cuttable:
    """A way to a TCP address on which all connections can be broken."""

    def __init__(self, address):
        host, port = address.removeprefix("tcp://").split(":")
        self._there, self._open, self._all = (host, int(port)), [], []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = []
        self._start(self._accept)

    def _start(self, work, *arguments):
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                ends = [self._listener.accept()[0], socket.create_connection(self._there)]
                self._open += ends
                self._all += ends
                for one, other in (ends, ends[::-1]):
                    self._start(self._pass_on, one, other)

    def _pass_on(self, source, target):
        with suppress(OSError):
            while data := source.recv(1000):
                target.sendall(data)
        self._break(source, target)

    def _break(self, *ends):
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        self._break(*self._open)
        self._open.clear()

    def close(self):
        self._break(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._all):
            end.close()


@pytest.mark.parametrize("mode", ["ssp", "managed"])
def test_connections_that_break_lose_nothing_and_keep_the_promise(mode):
    layout = Layout((TableSpec("w", 40, 30, staleness=1, mode=mode),), 1, 2)
    shard = shard_port(layout, 0, "tcp://127.0.0.1:0")
    way = Cuttable(shard.address)

    def work(number):
        with Node(layout, number, client_port(layout, number, [way.address])) as node:
            (worker,) = node.workers
            for clock in range(9):
                seen = worker["w"].get(np.arange(40))
                assert (seen >= 2 * max(0, clock - 1)).all()
                worker["w"].inc(np.arange(40), np.ones((40, 30)))
                worker.clock()
                if number == 0 and clock % 3 == 1:
                    way.cut()

    with served(ShardServer(layout, 0, shard)) as server, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, number) for number in range(2)]:
            done.result()
        np.testing.assert_array_equal(server.cells(0), 18)
    way.close()
    shard.close()
