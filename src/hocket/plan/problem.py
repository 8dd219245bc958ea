"""The Problem: all input of a planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.errors import UsageError
from hocket.cost.costs import Costs
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.limits import Limits
from hocket.plan.training import TransformerTraining

# Positions in this tuple are the modes of the compiled engine (`hocket.simulate.instructions`).
TransferMode = Literal["shared", "queued", "parallel"]
TRANSFER_MODES: tuple[TransferMode, ...] = ("shared", "queued", "parallel")
Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput")


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """The work, the cluster, the objective and the constraints."""

    work: Graph | TransformerTraining | None
    """A graph whose ops are placed, a training that is split over devices, or None for a
    collective, which needs the cluster alone."""
    cluster: Cluster
    op_costs: Costs | None = None
    """Times of a graph's ops and transfers; None for a training, which has coefficients instead."""
    transfers: TransferMode = "shared"
    """Model of simultaneous transfers: ``shared``, they split each channel's bandwidth equally;
    ``queued``, they run one after another at each device; ``parallel``, they do not affect each
    other."""
    objective: Objective = "latency"
    """Quantity to minimize: ``latency``, the time of one step, or ``throughput``, the load of the
    busiest device, which limits how often pipelined steps can start."""
    contiguous: bool = False
    """True if no path of forward ops may leave a device and return to it."""
    spare: float = 0.0
    """Fraction of each device's memory that parallel configs leave free."""
    limits: Limits | None = None
    """Limits of the configs to try; None to try all that the training program supports."""
    seed: int = 0

    def __repr__(self) -> str:
        return f"Problem({self.work!r} on {self.cluster!r}, {self.objective})"

    @property
    def graph(self) -> Graph:
        """The work, if it is a graph; raises `UsageError` otherwise."""
        if isinstance(self.work, Graph):
            return self.work
        raise UsageError(
            f"{self.work_name} has no ops to place", hint="plan it with hocket parallel"
        )

    @property
    def costs(self) -> Costs:
        """Times of the graph's ops and transfers; raises `UsageError` if there are none."""
        if self.op_costs is not None:
            return self.op_costs
        raise UsageError(f"the ops of {self.graph.name} have no times", hint="estimate their costs")

    @property
    def training(self) -> TransformerTraining:
        """The work, if it is a training; raises `UsageError` otherwise."""
        if isinstance(self.work, TransformerTraining):
            return self.work
        raise UsageError(
            f"{self.work_name} is not the training of a transformer",
            hint="plan a transformer's training with hocket parallel",
        )

    @property
    def work_hash(self) -> str:
        """The content hash of the work; empty for a collective."""
        return "" if self.work is None else self.work.content_hash

    @property
    def work_name(self) -> str:
        """Name of the work in error messages."""
        return "a collective" if self.work is None else self.work.name

    @property
    def memory_bytes(self) -> LongArray:
        """Usable bytes per device: without its headroom and the bytes that libraries reserve."""
        has = np.array([d.usable_bytes for d in self.cluster.devices], dtype=np.int64)
        usable: LongArray = has - self.costs.reserved_bytes[self.costs.device_row]
        return usable
