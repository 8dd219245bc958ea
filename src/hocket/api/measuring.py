"""Op times measured on this machine; imports PyTorch."""

from __future__ import annotations

from hocket.cost.measure import OUT_OF_MEMORY, OUT_OF_TIME, profile_program

__all__ = [
    "OUT_OF_MEMORY",
    "OUT_OF_TIME",
    "profile_program",
]
