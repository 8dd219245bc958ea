"""The fleet's daemon itself; imports what serves HTTP."""

from __future__ import annotations

from hocket.service.agent import Agent, AgentClient
from hocket.service.engines import check_engine
from hocket.service.executors.local_devices import found_devices, limit_warnings
from hocket.service.pinned_tls import checked_fingerprint
from hocket.service.serve import ServeSettings, Serving, serve
from hocket.service.server_config import read_server_config

__all__ = [
    "Agent",
    "AgentClient",
    "ServeSettings",
    "Serving",
    "check_engine",
    "checked_fingerprint",
    "found_devices",
    "limit_warnings",
    "read_server_config",
    "serve",
]
