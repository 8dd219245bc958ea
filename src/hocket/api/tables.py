"""Rows shared under bounded staleness."""

from __future__ import annotations

from hocket.tables.address import shard_port
from hocket.tables.check import arrangements, check_schedules
from hocket.tables.layout_file import read_layout
from hocket.tables.server import ShardServer

__all__ = [
    "ShardServer",
    "arrangements",
    "check_schedules",
    "read_layout",
    "shard_port",
]
