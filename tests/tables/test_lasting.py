"""What must last: checkpoints on full and foreign disks, rings of processes that were killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.tables import Layout, Node, ShardServer, TableSpec
from hocket.tables import server as checkpoint_module
from hocket.tables.address import client_port
from hocket.tables.group import inside_ports

pytest.importorskip("zmq")

from tables.attack_rig import ONE, refused, served, wait_until


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
