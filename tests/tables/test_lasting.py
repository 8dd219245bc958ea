"""What must last: checkpoints on full and foreign disks, rings of processes that were killed."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from hocket.base.errors import InputFileError, RunError, UsageError
from hocket.tables import Layout, Node, ShardServer, TableSpec
from hocket.tables import checkpoint as checkpoint_module
from hocket.tables.address import client_port, shard_port
from hocket.tables.transports.inside import inside_ports
from hocket.tables.transports.memory import Ring

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
