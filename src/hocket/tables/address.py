"""Where shards are, as people write it: ``tcp://host:4000``, ``ipc:///path`` or ``shm:///folder``."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from hocket.base.errors import UsageError
from hocket.tables.codec import longest
from hocket.tables.core.rule import change_width
from hocket.tables.spec import Layout
from hocket.tables.transports.port import Port

_MEMORY = "shm://"
_TCP = "tcp://"
_LOCAL = re.compile("(shm|ipc)://.")
_MAX_PORT = 65535
"""ZeroMQ counts a port above it from 0 again, and listens somewhere else."""


def shard_port(layout: Layout, shard: int, address: str) -> Port:
    """The port of a shard that listens at an address."""
    _check(address)
    if address.startswith(_MEMORY):
        from hocket.tables.transports.memory import memory_shard_port

        return memory_shard_port(_folder(address), shard, layout.num_shards, layout.num_clients)
    from hocket.tables.transports.zeromq import ZeroMqShardPort

    most = max(
        longest(layout.rows_of(table, shard), change_width(table.rule, table.width))
        for table in layout.tables
    )
    return ZeroMqShardPort(address, most)


def client_port(layout: Layout, client: int, addresses: Sequence[str]) -> Port:
    """The port of a client for the shards at these addresses; one folder of memory holds all."""
    for address in addresses:
        _check(address)
    if len(set(addresses)) == 1 and addresses[0].startswith(_MEMORY):
        from hocket.tables.transports.memory import memory_client_port

        folder = _folder(addresses[0])
        return memory_client_port(folder, client, layout.num_shards, layout.num_clients)
    if any(address.startswith(_MEMORY) for address in addresses):
        raise UsageError("shards in shared memory have one address", hint="shm:///dev/shm/name")
    if len(addresses) != layout.num_shards:
        raise UsageError(f"{layout.num_shards} shards but {len(addresses)} addresses")
    from hocket.tables.transports.zeromq import ZeroMqClientPort

    return ZeroMqClientPort(client, addresses)


def _check(address: str) -> None:
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    is_tcp = bool(host) and (port == "*" or (port.isdecimal() and int(port[:6]) <= _MAX_PORT))
    if not (is_tcp if address.startswith(_TCP) else _LOCAL.match(address)):
        raise UsageError(
            f"{address!r} is no address",
            hint="tcp://host:port with a port up to 65535, ipc:///path or shm:///folder",
        )


def _folder(address: str) -> Path:
    folder = Path(address.removeprefix(_MEMORY))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{address}: cannot be made: {error.strerror}", hint="shm:///dev/shm/name"
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{address}: others may write to it, or it is a link",
            hint="name a folder of yours, or one that does not exist yet",
        )
    return folder


def give_back(address: str) -> None:
    """Remove what stays behind of shards that no client will look for again."""
    if address.startswith(_MEMORY):
        from hocket.tables.transports.memory import remove_rings

        remove_rings(Path(address.removeprefix(_MEMORY)))
