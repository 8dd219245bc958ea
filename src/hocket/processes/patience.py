"""How long a process may give no sign of life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Times without a sign of life after which a process counts as stopped."""

    start_s: float = 120.0
    """Before its first."""
    silence_s: float = 5.0
    """Where the system sees nothing of it at work either."""
    stopped_s: float = 2.0
    """Where the system says that it is stopped."""
