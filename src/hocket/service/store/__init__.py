"""What the service knows, on disk: never lost once answered, never started from when damaged."""

from __future__ import annotations

from hocket.service.store.store import Store

__all__ = ["Store"]
