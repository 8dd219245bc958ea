"""Scripts of people started as ranks of a plan; imports PyTorch."""

from __future__ import annotations

from hocket.runtime.launch import Machines, launch

__all__ = ["Machines", "launch"]
