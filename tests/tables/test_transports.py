"""Rows between processes: ZeroMQ, and a shard that is killed and started again."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.tables import Layout, Node, ShardServer, TableSpec
from hocket.tables.address import client_port, shard_port
from hocket.tables.layout_file import read_layout

pytest.importorskip("zmq")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_two_clients_and_two_shards_agree_over_a_transport(tmp_path, kind):
    layout = Layout((TableSpec("w", 9, 3, staleness=0),), 2, 2)
    named = [f"ipc://{tmp_path}/{shard}" for shard in range(2)]
    given_at = named if kind == "ipc" else ["tcp://127.0.0.1:0"] * 2
    stop = threading.Event()
    ports = [shard_port(layout, shard, given_at[shard]) for shard in range(2)]
    addresses = [port.address for port in ports]
    servers = [ShardServer(layout, shard, port) for shard, port in enumerate(ports)]
    threads = [threading.Thread(target=server.run, args=(stop,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        with (
            Node(layout, 0, client_port(layout, 0, addresses), timeout_s=120) as first,
            Node(layout, 1, client_port(layout, 1, addresses), timeout_s=120) as second,
        ):
            for clock in range(5):
                for node in (first, second):
                    (worker,) = node.workers
                    seen = worker["w"].get(np.arange(9))
                    assert ((seen >= 2 * clock) & (seen <= 2 * clock + 1)).all()
                    worker["w"].inc(np.arange(9), np.ones((9, 3)))
                    worker.clock()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for port in ports:
            port.close()
    for server in servers:
        np.testing.assert_array_equal(server.cells(0), 10)


def served(folder, address):
    """A shard in a process of its own, as typed, and its address."""
    command = [sys.executable, "-m", "hocket", "tables", "serve", str(folder / "tables.toml"),
               "--checkpoint", str(folder / "shard.npz"), "--every", "0.1", "--json"]  # fmt: skip
    shard = subprocess.Popen([*command, "--at", address], stdout=subprocess.PIPE, text=True)
    with shard.stdout:
        lines = list(iter(shard.stdout.readline, "}\n"))
    return shard, json.loads("".join([*lines, "}"]))["address"]


def test_a_shard_that_is_killed_comes_back_and_nothing_acknowledged_is_lost(tmp_path):
    (tmp_path / "tables.toml").write_text(
        '[[table]]\nname = "w"\nrows = 6\nwidth = 2\nstaleness = 1\n'
    )
    layout = read_layout(tmp_path / "tables.toml")
    shard, address = served(tmp_path, "tcp://127.0.0.1:0")
    try:
        with Node(layout, 0, client_port(layout, 0, [address]), timeout_s=240) as node:
            (worker,) = node.workers
            for clock in range(12):
                seen = worker["w"].get(np.arange(6))
                assert (seen == clock).all()
                worker["w"].inc(np.arange(6), np.ones((6, 2)))
                worker.clock()
                if clock in (3, 7):
                    shard.kill()
                    shard.wait()
                    shard, _ = served(tmp_path, address)
            node.flush()
        # A client that comes later reads what the earlier one was told to be safe.
        with Node(layout, 0, client_port(layout, 0, [address]), timeout_s=240) as node:
            assert (node.workers[0]["w"].get(np.arange(6)) == 12).all()
            assert node.workers[0].now == 12
    finally:
        shard.kill()
        shard.wait()


def test_addresses_and_layout_files_are_checked(tmp_path):
    layout = Layout((TableSpec("w", 6, 2),), 2, 1)
    with pytest.raises(UsageError, match="is no address"):
        client_port(layout, 0, ["localhost:1"])
    with pytest.raises(UsageError, match="2 shards but 1 addresses"):
        client_port(layout, 0, ["tcp://localhost:1"])
    path = tmp_path / "tables.toml"
    path.write_text('[[table]]\nname = "w"\nrows = 3\nwidth = 2\nstalenes = 1\n')
    with pytest.raises(InputFileError, match=r"unknown key 'table\.0\.stalenes'") as found:
        read_layout(path)
    assert "did you mean 'staleness'" in found.value.hint
    path.write_text('shards = 3\n[[table]]\nname = "w"\nrows = 3\nwidth = 2\nstaleness = inf\n')
    assert read_layout(path).tables[0].is_asynchronous
