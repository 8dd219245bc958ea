"""Costs: time of each op on each device type and of each tensor on each route.

All predictions use these costs. Each op time records its source: the roofline model, a measured
profile, or the graph's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.graph.graph import ANY_KIND, CPU_KIND, Graph
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.hardware.routes import Routes


class TimeSource(IntEnum):
    """Origin of an op time."""

    MODEL = 0
    PROFILE = 1
    FILE = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Costs:
    """Op times per device type and transfer times per route, with the source of each."""

    kind_names: tuple[str, ...]
    """Device types, one per row of ``op_s``."""
    op_s: FloatArray
    """[device type, op]: seconds; infinite if the op cannot run on that device type."""
    op_source: NDArray[np.uint8]
    """[device type, op]: a `TimeSource`."""
    device_row: IntArray
    """Row of ``op_s`` for each device."""
    routes: Routes
    tensor_bytes: NDArray[np.int64]
    tensor_s: FloatArray | None = None
    """Seconds per link for each tensor, if the graph's file states them."""
    reserved_bytes: NDArray[np.int64]
    """[device type]: bytes that libraries reserve on each device; 0 if unknown."""
    settings: Mapping[str, Any]
    """Profile, calibration and options from which the costs can be recomputed."""
    demand: FloatArray | None = None
    """[quantity, device type, op]: demand for device and host when two streams run concurrently;
    see `hocket.cost.demand`. None: streams do not slow each other down."""
    is_host_bound: bool = False
    """True if a step of the full graph takes the host longer to launch than the device to run."""

    def __repr__(self) -> str:
        return f"Costs({self.op_s.shape[1]} ops on {', '.join(self.kind_names)})"

    def transfer_s(self, tensor: int, src: int, dst: int) -> float:
        """Seconds to move one tensor between two devices over idle links."""
        if src == dst:
            return 0.0
        latency_s = float(self.routes.latency_s[src, dst])
        if self.tensor_s is not None:
            # Stated seconds are per link, so they add up over the links of the route.
            return latency_s + float(self.tensor_s[tensor]) * int(self.routes.hops[src, dst])
        return latency_s + float(self.tensor_bytes[tensor] / self.routes.bandwidth_bps[src, dst])

    def channel_capacity(self) -> FloatArray:
        """Capacity of each channel per second."""
        # With stated times, work is in seconds per link, which a channel does at a rate of 1.
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
    """Op times that the graph's own file states for a device type; None if it states none.

    Looked up by the device type's name, then by ``cpu`` for CPUs, then by ``ANY_KIND``.
    """
    if graph.stated is None:
        return None
    names = (kind.name, CPU_KIND, ANY_KIND) if kind.is_cpu else (kind.name, ANY_KIND)
    return next((graph.stated.op_s[name] for name in names if name in graph.stated.op_s), None)
