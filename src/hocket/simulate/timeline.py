"""The Timeline: spans of ops and transfers, and memory over time, of a simulated or measured step.

All views read this one form. The ops of a pipeline schedule are its actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.units import format_seconds
from hocket.graph.graph import Stream


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Spans of ops and transfers, and bytes held on each device over time; time starts at 0."""

    makespan_s: float
    """Time at which everything has ended."""
    op_device: IntArray
    """Device of each op. Ops have the numbers of the graph, actions those of the schedule."""
    op_stream: NDArray[np.int8]
    """`hocket.graph.graph.Stream` of each op."""
    op_start_s: FloatArray
    op_end_s: FloatArray
    transfer_tensor: IntArray
    """Tensor of each transfer; a tensor is sent to a device once. Transfers are sorted by start."""
    transfer_src: IntArray
    transfer_dst: IntArray
    transfer_ready_s: FloatArray
    """Time at which each transfer's tensor was ready to be sent."""
    transfer_start_s: FloatArray
    transfer_end_s: FloatArray
    memory_ptr: LongArray
    """Curve of device d: entries ``memory_ptr[d]`` up to ``memory_ptr[d + 1]``."""
    memory_time_s: FloatArray
    """Times of each device's curve: the first is 0, and they strictly increase."""
    memory_bytes: LongArray
    """Bytes held from that time on, after all changes at that time. A higher value that is held for
    no time shows in ``peak_bytes``, not in the curve."""
    peak_bytes: LongArray
    """Highest bytes held on each device."""

    def __repr__(self) -> str:
        return (
            f"Timeline({format_seconds(self.makespan_s)}, {len(self.op_device)} ops and "
            f"{len(self.transfer_tensor)} transfers on {self.num_devices} devices)"
        )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.peak_bytes)

    def memory_curve(self, device: int) -> tuple[FloatArray, LongArray]:
        """Return times, and the bytes that a device holds from each time on."""
        part = slice(int(self.memory_ptr[device]), int(self.memory_ptr[device + 1]))
        return self.memory_time_s[part], self.memory_bytes[part]

    @property
    def busy_s(self) -> FloatArray:
        """Seconds in which each device computes, on one or both compute streams. Copies and
        collectives on other streams do not count."""
        computes = self.op_stream == Stream.COMPUTE
        if (self.op_stream == Stream.SECOND).any():
            # Kernels of both streams overlap, so their lengths must not be added up.
            both = computes | (self.op_stream == Stream.SECOND)
            spans = self.op_device[both], self.op_start_s[both], self.op_end_s[both]
            return covered_s(*spans, self.num_devices)
        length_s = np.where(computes, self.op_end_s - self.op_start_s, 0.0)
        busy_s = np.bincount(self.op_device, weights=length_s, minlength=self.num_devices)
        return busy_s.astype(np.float64)

    @property
    def idle_share(self) -> float:
        """Fraction of all devices' time in which they do not compute: in a pipeline, its bubble."""
        total_s = self.num_devices * self.makespan_s
        return max(0.0, 1 - float(self.busy_s.sum()) / total_s) if total_s else 0.0


def covered_s(
    group: IntArray, start_s: FloatArray, end_s: FloatArray, num_groups: int
) -> FloatArray:
    """Return, per group, the seconds that at least one of its spans covers."""
    order = np.lexsort((start_s, group))
    start_s, end_s = start_s[order], end_s[order]
    edges = np.searchsorted(group[order], np.arange(num_groups + 1))
    found_s = np.zeros(num_groups)
    for index in range(num_groups):
        own = slice(edges[index], edges[index + 1])
        # Ends reached so far: only the part of a span beyond them is new.
        reached_s = np.maximum.accumulate(np.append(0.0, end_s[own]))
        new_s = reached_s[1:] - np.maximum(start_s[own], reached_s[:-1])
        found_s[index] = np.maximum(new_s, 0).sum()
    return found_s
