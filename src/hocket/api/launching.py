"""Scripts of people started as ranks of a plan; imports PyTorch."""

from __future__ import annotations

from hocket.runtime.launch import launch

__all__ = ["launch"]
