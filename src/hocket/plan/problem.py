"""The Problem: all that a planner may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hocket.base.arrays import LongArray
from hocket.cost.costs import Costs
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster

TransferMode = Literal["shared", "queued", "parallel"]
TRANSFER_MODES: tuple[TransferMode, ...] = ("shared", "queued", "parallel")
Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput")


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """A graph to run on a cluster at given costs."""

    graph: Graph
    cluster: Cluster
    costs: Costs
    transfers: TransferMode = "shared"
    """How simultaneous transfers affect each other: they share each channel's bandwidth equally,
    they queue one after another at each device, or they do not notice each other."""
    objective: Objective = "latency"
    """What to make small: the time of one step, or the load of the busiest device, which limits how
    often steps can follow each other when they are pipelined."""
    contiguous: bool = False
    """Whether no path of forward ops may leave a device and come back to it."""
    seed: int = 0

    def __repr__(self) -> str:
        return f"Problem({self.graph!r} on {self.cluster!r}, {self.objective})"

    @property
    def memory_bytes(self) -> LongArray:
        """Usable bytes per device: all but its headroom and what a profile saw libraries keep."""
        has = np.array([d.usable_bytes for d in self.cluster.devices], dtype=np.int64)
        usable: LongArray = has - self.costs.reserved_bytes[self.costs.device_row]
        return usable
