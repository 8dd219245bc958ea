"""Durable store of the service: what was committed survives, and a damaged database is refused."""

from __future__ import annotations

from hocket.service.store.store import Store

__all__ = ["Store"]
