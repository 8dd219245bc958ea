"""The Timeline: what happened or would happen, as columns of spans and memory curves.

One form for all pictures: a simulated step, a measured one, a pipeline, a fleet. Spans of work come
first, in the order of whoever made the timeline (ops by number, actions as scheduled); transfers
follow by start.
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
    """Spans of work and transfers, and the bytes held on each device over time. Starts at 0."""

    makespan_s: float
    """When everything is over."""
    num_works: int
    """The first spans are work; those behind them are transfers, by (start, what, device)."""
    device: IntArray
    """Device of each span; of a transfer, the destination."""
    stream: NDArray[np.int8]
    """`hocket.graph.graph.Stream` of work; 0 for transfers."""
    what: IntArray
    """The op or the stage's work; the tensor that is sent."""
    instance: IntArray
    """Number of the repetition: the microbatch or the attempt; 0 where it is done once."""
    src: IntArray
    """Source device of a transfer; -1 for work."""
    ready_s: FloatArray
    """When what the span needs was there."""
    start_s: FloatArray
    end_s: FloatArray
    memory_ptr: LongArray
    """Curve of device d: entries ``memory_ptr[d]`` up to ``memory_ptr[d + 1]``."""
    memory_time_s: FloatArray
    """Ascending per device, first entry 0, no two entries of a device at one time."""
    memory_bytes: LongArray
    """Bytes held from that time on. At one instant releases come before allocations; an instant
    whose highest value is not its last is seen in ``peak_bytes``, not in the curve."""
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
        """Times and bytes held from each of them on."""
        part = slice(int(self.memory_ptr[device]), int(self.memory_ptr[device + 1]))
        return self.memory_time_s[part], self.memory_bytes[part]

    @property
    def busy_s(self) -> FloatArray:
        """Seconds in which each device computes, on one stream or both; copies and sums on other
        streams run concurrently."""
        stream = self.stream[: self.num_works]
        computes = stream == Stream.COMPUTE
        length_s = np.where(computes, self.op_end_s - self.op_start_s, 0.0)
        busy_s = np.bincount(self.op_device, weights=length_s, minlength=self.num_devices)
        if not (stream == Stream.SECOND).any():
            return busy_s.astype(np.float64)
        computing = computes | (stream == Stream.SECOND)
        return np.array([
            _covered_s(self.op_start_s[here], self.op_end_s[here])
            for here in (computing & (self.op_device == d) for d in range(self.num_devices))
        ])  # fmt: skip

    @property
    def idle_share(self) -> float:
        """Share of all devices' time in which they do nothing: in a pipeline, its bubble."""
        total_s = self.num_devices * self.makespan_s
        return max(0.0, 1 - float(self.busy_s.sum()) / total_s) if total_s else 0.0

    # ── work ─────────────────────────────────────────────────────────────────────────────────

    @property
    def op_device(self) -> IntArray:
        """Device of each op."""
        return self.device[: self.num_works]

    @property
    def op_start_s(self) -> FloatArray:
        """Start of each op."""
        return self.start_s[: self.num_works]

    @property
    def op_end_s(self) -> FloatArray:
        """End of each op."""
        return self.end_s[: self.num_works]

    # ── transfers ────────────────────────────────────────────────────────────────────────────

    @property
    def transfer_tensor(self) -> IntArray:
        """The tensor of each transfer; a tensor goes to a device once."""
        return self.what[self.num_works :]

    @property
    def transfer_src(self) -> IntArray:
        """Source device."""
        return self.src[self.num_works :]

    @property
    def transfer_dst(self) -> IntArray:
        """Destination device."""
        return self.device[self.num_works :]

    @property
    def transfer_ready_s(self) -> FloatArray:
        """When the tensor was there to be sent."""
        return self.ready_s[self.num_works :]

    @property
    def transfer_start_s(self) -> FloatArray:
        """When it leaves."""
        return self.start_s[self.num_works :]

    @property
    def transfer_end_s(self) -> FloatArray:
        """When it has arrived."""
        return self.end_s[self.num_works :]


def _covered_s(start_s: FloatArray, end_s: FloatArray) -> float:
    """Seconds that lie in at least one span."""
    order = np.argsort(start_s, kind="stable")
    start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
    before_s = np.concatenate(([0.0], end_s[:-1])) if len(end_s) else end_s
    return float(np.maximum(end_s - np.maximum(start_s, before_s), 0.0).sum())


def step_timeline(
    *,
    op_device: NDArray[np.integer],
    op_stream: NDArray[np.integer],
    op_ready_s: FloatArray,
    op_start_s: FloatArray,
    op_end_s: FloatArray,
    transfer_tensor: NDArray[np.integer],
    transfer_src: NDArray[np.integer],
    transfer_dst: NDArray[np.integer],
    transfer_ready_s: FloatArray,
    transfer_start_s: FloatArray,
    transfer_end_s: FloatArray,
    memory_ptr: LongArray,
    memory_time_s: FloatArray,
    memory_bytes: LongArray,
    peak_bytes: LongArray,
    least_s: float = 0.0,
) -> Timeline:
    """The timeline of one step of a graph; it lasts ``least_s`` at least."""
    num_ops, num_transfers = len(op_device), len(transfer_tensor)
    end_s = np.concatenate((op_end_s, transfer_end_s))
    whole = np.arange(num_ops)
    return Timeline(
        makespan_s=max(float(np.nanmax(end_s, initial=0.0)), least_s),
        num_works=num_ops,
        device=np.concatenate((op_device, transfer_dst)).astype(np.int32),
        stream=np.concatenate((op_stream, np.zeros(num_transfers))).astype(np.int8),
        what=np.concatenate((whole, transfer_tensor)).astype(np.int32),
        instance=np.zeros(num_ops + num_transfers, dtype=np.int32),
        src=np.concatenate((np.full(num_ops, -1), transfer_src)).astype(np.int32),
        ready_s=np.concatenate((op_ready_s, transfer_ready_s)),
        start_s=np.concatenate((op_start_s, transfer_start_s)),
        end_s=end_s,
        memory_ptr=memory_ptr,
        memory_time_s=memory_time_s,
        memory_bytes=memory_bytes,
        peak_bytes=peak_bytes,
    )
