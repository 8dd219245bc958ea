"""Durable store of the service: never lost once answered, never started from when damaged."""

from __future__ import annotations

from hocket.service.store.store import Store

__all__ = ["Store"]
