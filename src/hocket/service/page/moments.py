"""Times as text: how long ago, how far ahead."""

from __future__ import annotations

from datetime import UTC, datetime

from hocket.base.units import words_for_seconds


def ahead(duration_s: float) -> str:
    """``'in 12 min'``; less than half a second ahead is ``'now'``."""
    return f"in {words_for_seconds(duration_s)}" if duration_s >= 0.5 else "now"


def ago(duration_s: float) -> str:
    """``'12 min ago'``; less than a second is ``'just now'``."""
    return f"{words_for_seconds(duration_s)} ago" if duration_s >= 0.5 else "just now"


def clock(time_s: float) -> str:
    """A moment in full, in universal time: ``'2026-03-01 14:05:09 UTC'``."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
