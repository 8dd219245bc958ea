"""The Plan: every decision, as data.

A plan is a set of sections, each filled by a planner and left None until then. It is tied to its
graph and cluster by their content hashes, so a plan for something else is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.base.arrays import FloatArray, IntArray

PLAN_SCHEMA = "hocket.plan/1"


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Decisions about one graph on one cluster."""

    planner: str = ""
    """Names of the planners that made it, joined by ' + '."""
    graph_hash: str = ""
    cluster_hash: str = ""
    device_of: IntArray | None = None
    """Section placement: the device of each op."""
    order: tuple[IntArray, ...] | None = None
    """Section order: per device, its ops in the order in which they run."""
    priority: FloatArray | None = None
    """Section order, the other form: of the ops that are ready, the device runs the one with the
    smallest value first; without either, the smallest position in the graph."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the planner wants to tell (bounds, counts); shown, never interpreted."""

    def __repr__(self) -> str:
        if self.device_of is None:
            return f"Plan({self.planner!r}, nothing placed)"
        num_devices = len(set(self.device_of.tolist()))
        return f"Plan({self.planner!r}, {len(self.device_of)} ops on {num_devices} devices)"
