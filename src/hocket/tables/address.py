"""Addresses of shards: ``tcp://host:4000`` or ``ipc:///path``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hocket.base.errors import UsageError
from hocket.tables.codec import longest
from hocket.tables.core.rule import change_width
from hocket.tables.spec import Layout
from hocket.tables.transports.port import Port

_TCP = "tcp://"
_LOCAL = re.compile("ipc://.")
_MAX_PORT = 65535
"""Highest TCP port. ZeroMQ wraps larger numbers around and would listen on another port."""


def shard_port(layout: Layout, shard: int, address: str) -> Port:
    """Port of a shard that listens at an address."""
    _check(address)
    from hocket.tables.transports.zeromq import ZeroMqShardPort

    # A longer message cannot come from a client of this layout; the socket closes its connection.
    most = max(
        longest(layout.rows_of(table, shard), change_width(table.rule, table.width))
        for table in layout.tables
    )
    return ZeroMqShardPort(address, most)


def client_port(layout: Layout, client: int, addresses: Sequence[str]) -> Port:
    """Port of a client that connects to the shards at these addresses."""
    for address in addresses:
        _check(address)
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
            hint="tcp://host:port with a port up to 65535, or ipc:///path",
        )
