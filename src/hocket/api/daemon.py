"""The fleet's daemon; importing this loads the HTTP server."""

from __future__ import annotations

from hocket.service.agent import Agent, AgentClient
from hocket.service.executors.local_devices import found_devices, limit_warnings
from hocket.service.pinned_tls import checked_fingerprint
from hocket.service.serve import ServeSettings, Serving, check_engine, engine_name, serve
from hocket.service.server_config import read_server_config

__all__ = [
    "Agent",
    "AgentClient",
    "ServeSettings",
    "Serving",
    "check_engine",
    "checked_fingerprint",
    "engine_name",
    "found_devices",
    "limit_warnings",
    "read_server_config",
    "serve",
]
