"""In which precision autocast computes now, if it does."""

from __future__ import annotations

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The type on a kind of device, such as ``cuda``; None where autocast is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
