"""State of autocast."""

from __future__ import annotations

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return autocast's type on a device type, such as ``cuda``; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device types on which autocast is on, with its type; traced steps depend on it.

    The cache of autocast is no part of it: how often a parameter is cast changes no number.
    """
    found = ((kind, autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return tuple((kind, dtype) for kind, dtype in found if dtype is not None)
