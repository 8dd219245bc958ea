"""The fleet's daemon itself; imports what serves HTTP."""

from __future__ import annotations

from hocket.service.engines import check_engine
from hocket.service.executors.local_devices import found_devices, limit_warnings
from hocket.service.serve import ServeSettings, serve
from hocket.service.server_config import read_server_config

__all__ = [
    "ServeSettings",
    "check_engine",
    "found_devices",
    "limit_warnings",
    "read_server_config",
    "serve",
]
