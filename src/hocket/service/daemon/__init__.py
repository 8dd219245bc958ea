"""The daemon: decides which jobs run where, commits the decisions, and executes them."""

from __future__ import annotations

from hocket.service.daemon.daemon import Daemon

__all__ = ["Daemon"]
