"""Costs: how long each op takes on each kind of device and each tensor on each route.

One place where every prediction comes from. Each op time remembers its source: the roofline model,
a measured profile, or the file that the graph came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.graph.graph import ANY_KIND, CPU_KIND, Graph
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.hardware.routes import Routes


def _nothing() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


class TimeSource(IntEnum):
    """Origin of an op time."""

    MODEL = 0
    PROFILE = 1
    FILE = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Costs:
    """Op times per device kind, transfer times per route, and where each number came from."""

    kind_names: tuple[str, ...]
    """Device kinds, one per row of ``op_s``."""
    op_s: FloatArray
    """[kind, op]: seconds; infinite where the op cannot run on that kind."""
    op_source: NDArray[np.uint8]
    """[kind, op]: a `TimeSource`."""
    device_row: IntArray
    """Row of ``op_s`` for each device."""
    routes: Routes
    tensor_bytes: NDArray[np.int64]
    tensor_s: FloatArray | None = None
    """Seconds per link for each tensor, where the file of the graph states them."""
    settings: Mapping[str, Any]
    """Profile and calibration of the costs, enough to compute them again."""
    demand: FloatArray | None = None
    """[share, kind, op]: what each op asks of device and host; see `hocket.cost.demand`. None: two
    streams do not notice each other."""
    reserved_bytes: NDArray[np.int64] = field(default_factory=_nothing)
    """[kind]: bytes that libraries keep on each device of that kind; zeros where not given."""

    def __post_init__(self) -> None:
        if not len(self.reserved_bytes):
            zeros = np.zeros(len(self.kind_names), dtype=np.int64)
            object.__setattr__(self, "reserved_bytes", zeros)

    def __repr__(self) -> str:
        return f"Costs({self.op_s.shape[1]} ops on {', '.join(self.kind_names)})"

    def transfer_s(self, tensor: int, src: int, dst: int) -> float:
        """Seconds to move one tensor between two devices on idle links."""
        if src == dst:
            return 0.0
        latency_s = float(self.routes.latency_s[src, dst])
        if self.tensor_s is not None:
            return latency_s + float(self.tensor_s[tensor]) * int(self.routes.hops[src, dst])
        return latency_s + float(self.tensor_bytes[tensor] / self.routes.bandwidth_bps[src, dst])

    def channel_capacity(self) -> FloatArray:
        """Work per second that each channel does."""
        if self.tensor_s is not None:
            return np.ones_like(self.routes.channel_bandwidth_bps)
        return self.routes.channel_bandwidth_bps

    def sources(self) -> dict[str, int]:
        """Number of op times by source, over all device types."""
        counts = np.bincount(self.op_source.ravel(), minlength=len(TimeSource))
        return {source.name.lower(): int(counts[source]) for source in TimeSource if counts[source]}


def device_rows(cluster: Cluster) -> IntArray:
    """Index into ``cluster.kinds`` for each device."""
    row = {kind.name: index for index, kind in enumerate(cluster.kinds)}
    return np.array([row[device.kind.name] for device in cluster.devices], dtype=np.int32)


def stated_op_s(graph: Graph, kind: DeviceKind) -> FloatArray | None:
    """The times that the graph's own file states for a kind of device; None where it has none.

    Looked up by the name of the kind, then under ``cpu`` for CPUs, then under ``ANY_KIND``.
    """
    if graph.stated is None:
        return None
    names = (kind.name, CPU_KIND, ANY_KIND) if kind.is_cpu else (kind.name, ANY_KIND)
    return next((graph.stated.op_s[name] for name in names if name in graph.stated.op_s), None)
