"""The planners by name, and how candidates are compared."""

from __future__ import annotations

from hocket.planners import PLANNERS, find_planner
from hocket.planners.compare import compare
from hocket.planners.goal import num_devices
from hocket.planners.registry import FURTHER

__all__ = [
    "FURTHER",
    "PLANNERS",
    "compare",
    "find_planner",
    "num_devices",
]
