"""What tables do where something is wrong: strangers, garbage, full disks, those who vanish."""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from hocket.base.errors import InputFileError, MissingExtraError, RunError, UsageError
from hocket.tables import Layout, Node, ShardServer, TableSpec, local_tables
from hocket.tables import checkpoint as checkpoint_module
from hocket.tables import route as route_module
from hocket.tables.address import client_port, shard_port
from hocket.tables.codec import decode, encode
from hocket.tables.core.message import COUNT, HEAD, KIND, UPDATES, Message
from hocket.tables.transports.inside import inside_ports
from hocket.tables.transports.memory import Ring

pytest.importorskip("zmq")

ONE = Layout((TableSpec("w", 4, 2, staleness=1),))


@contextmanager
def served(server):
    """A shard that runs in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()
        server.abandon()


def refused(use, pattern):
    """Use tables until they say so; that a shard is slow to answer they may say before."""
    while True:
        with pytest.raises(RunError) as found:
            use()
        if re.search(pattern, found.value.message):
            return
        assert "has said nothing" in found.value.message


def wait_until(node, is_done):
    node.wait_for(is_done, "to do so in a test")


# ── wrong use ───────────────────────────────────────────────────────────────────────────────────


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
    spec = TableSpec("w", 1, 1, staleness=0, is_adaptive=True)
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
        pytest.raises(RunError, match="shard 0 has said nothing"),
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


# ── strangers and garbage ───────────────────────────────────────────────────────────────────────


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
    monkeypatch.setattr(route_module, "MAX_UNDER_WAY_BYTES", 5_000)
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


# ── who vanishes ────────────────────────────────────────────────────────────────────────────────


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
            refused(lambda: worker["w"].get([0]), "client 1 has said .* clock 1, .* its clock 2")
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
    with pytest.raises(RunError, match="shard 0 has said nothing"):
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


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────


def test_what_was_flushed_is_in_the_checkpoint(tmp_path):
    path = tmp_path / "shard.npz"
    ports, (port,) = inside_ports(1, 1)
    server = ShardServer(ONE, 0, ports[0], checkpoint=path, checkpoint_s=1e6)
    with served(server), Node(ONE, 0, port) as node:
        node.workers[0]["w"].inc([2], [1, 1])
    # It was killed, and no client is left that could send anything again.
    again = ShardServer(ONE, 0, ports[0], checkpoint=path)
    assert again.cells(0)[2].tolist() == [1, 1]
    again.abandon()


def test_a_full_disk_is_told_and_when_there_is_room_nothing_is_lost(tmp_path, monkeypatch, caplog):
    path = tmp_path / "shard.npz"
    ports, (port,) = inside_ports(1, 1)
    write, is_full = checkpoint_module.write_atomically, threading.Event()

    def write_if_there_is_room(*arguments):
        if is_full.is_set():
            raise UsageError("cannot write: No space left on device")
        write(*arguments)

    monkeypatch.setattr(checkpoint_module, "write_atomically", write_if_there_is_room)
    monkeypatch.setattr("hocket.tables.server._AGAIN_S", 0.05)
    with (
        caplog.at_level(logging.WARNING),
        served(ShardServer(ONE, 0, ports[0], checkpoint=path, checkpoint_s=0)) as server,
        Node(ONE, 0, port) as node,
    ):
        is_full.set()
        node.workers[0]["w"].inc([2], [1, 1])
        node.timeout_s = 0.5
        refused(node.flush, "waited 0.5 s for the shards to write a checkpoint")
        assert server.cells(0)[2].tolist() == [1, 1]
        node.timeout_s = 60
        is_full.clear()
        node.flush()
    assert "No space left" in caplog.text
    again = ShardServer(ONE, 0, ports[0], checkpoint=path)
    assert again.cells(0)[2].tolist() == [1, 1]
    again.abandon()


def test_checkpoints_that_are_not_ones_own_are_refused(tmp_path):
    ports, _ = inside_ports(1, 1)
    path = tmp_path / "shard.npz"
    held = ShardServer(ONE, 0, ports[0], checkpoint=path)
    with pytest.raises(UsageError, match="another shard that runs"):
        ShardServer(ONE, 0, ports[0], checkpoint=path)
    held.close()
    assert [each.name for each in tmp_path.iterdir()] == ["shard.npz"]
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-30], b"PK\3\4" + bytes(200), b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(InputFileError, match="no checkpoint of a shard"):
            ShardServer(ONE, 0, ports[0], checkpoint=path)
        assert path.read_bytes() == content
    path.write_bytes(whole)
    with pytest.raises(InputFileError, match="differs in clients"):
        ShardServer(Layout(ONE.tables, 1, 2), 0, ports[0], checkpoint=path)
    with pytest.raises(UsageError, match="no checkpoint can be written here"):
        ShardServer(ONE, 0, ports[0], checkpoint=tmp_path / "none" / "shard.npz")
    with pytest.raises(InputFileError, match="Is a directory"):
        ShardServer(ONE, 0, ports[0], checkpoint=tmp_path)
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    ShardServer(ONE, 0, ports[0], checkpoint=link).close()
    assert link.is_symlink()


def test_tables_that_memory_cannot_hold_are_refused():
    ports, _ = inside_ports(1, 1)
    layout = Layout((TableSpec("w", 2**31 - 1, 2**16 - 1),))
    with pytest.raises(UsageError, match=r"shard 0 needs .* are free"):
        ShardServer(layout, 0, ports[0])


def test_serve_writes_its_checkpoint_when_it_is_told_to_end(tmp_path):
    (tmp_path / "tables.toml").write_text(
        '[[table]]\nname = "w"\nrows = 4\nwidth = 2\nstaleness = 1\n'
    )
    path, address = tmp_path / "shard.npz", f"ipc://{tmp_path}/socket"
    command = [sys.executable, "-m", "hocket", "tables", "serve", "tables.toml", "--at", address,
               "--checkpoint", str(path), "--every", "100000"]  # fmt: skip
    shard = subprocess.Popen(command, cwd=tmp_path)
    try:
        node = Node(ONE, 0, client_port(ONE, 0, [address]), timeout_s=300).__enter__()
        node.workers[0]["w"].inc([2], [1, 1])
        node.workers[0].clock()
        wait_until(node, lambda: not any(link.has_unapplied for (link,) in node.links))
        os.kill(shard.pid, signal.SIGTERM)
        assert shard.wait(120) == 0
        node.close()
    finally:
        shard.kill()
        shard.wait()
    ports, _ = inside_ports(1, 1)
    again = ShardServer(ONE, 0, ports[0], checkpoint=path)
    assert again.cells(0)[2].tolist() == [1, 1]
    again.abandon()


# ── shared memory ───────────────────────────────────────────────────────────────────────────────


def test_what_a_killed_process_had_begun_to_write_is_left_out(tmp_path):
    killed, reader = Ring(tmp_path / "ring", 64), Ring(tmp_path / "ring", 64)
    killed.send(b"a" * 90)  # in pieces, of which the last do not fit
    assert reader.receive() is None
    Ring(tmp_path / "ring", 64).send(b"new")
    assert reader.receive() == b"new"
    # And one who came in the middle leaves the rest out.
    writer = Ring(tmp_path / "ring", 64)
    writer.send(b"b" * 90)
    assert reader.receive() is None
    late = Ring(tmp_path / "ring", 64)
    writer.send(b"next")
    found = None
    while found is None:
        writer.push()
        found = late.receive()
    assert found == b"next"


def test_rings_that_find_no_room_or_no_folder_are_told(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(RunError, match=r"no ring of .* KiB in shared memory"):
            Ring(tmp_path / "ring", 2**22)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="no ring of"):
        Ring(tmp_path / "link", 64)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="others may write to it"):
        shard_port(ONE, 0, f"shm://{tmp_path}/open")


def test_nobody_reads_from_rings_of_another_process(tmp_path):
    address = f"shm://{tmp_path}/rings"
    shard, client = shard_port(ONE, 0, address), client_port(ONE, 0, [address])
    with pytest.raises(RunError, match="another process is shard 0 here"):
        shard_port(ONE, 0, address)
    with pytest.raises(RunError, match="another process is client 0 here"):
        client_port(ONE, 0, [address])
    shard.close()
    client.close()
    shard_port(ONE, 0, address).close()
