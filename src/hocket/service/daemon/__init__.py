"""The daemon: decide, commit, act."""

from __future__ import annotations

from hocket.service.daemon.daemon import Daemon

__all__ = ["Daemon"]
