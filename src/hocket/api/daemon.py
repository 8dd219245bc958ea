"""The fleet's daemon itself; imports what serves HTTP."""

from __future__ import annotations

from hocket.service.engines import check_engine
from hocket.service.executors.local_devices import found_devices
from hocket.service.serve import ServeSettings, serve

__all__ = [
    "ServeSettings",
    "check_engine",
    "found_devices",
    "serve",
]
