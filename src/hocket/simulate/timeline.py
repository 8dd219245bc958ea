"""The Timeline: a simulated or measured run, as columns of spans and memory curves.

All views read this one form: simulated and measured steps, pipelines and fleets. Spans of work come
first, in the order chosen by the code that made the timeline (ops by number, actions as scheduled),
then transfers by start.
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
    """Spans of work and transfers, and bytes held on each device over time; time starts at 0."""

    makespan_s: float
    """Time at which everything has ended."""
    num_works: int
    """Number of spans of work; later spans are transfers, sorted by (start, what, device)."""
    device: IntArray
    """Device of each span; the destination of a transfer."""
    stream: NDArray[np.int8]
    """`hocket.graph.graph.Stream` of work; 0 for transfers."""
    what: IntArray
    """Number of the op or of the stage's work, or the tensor that is sent."""
    instance: IntArray
    """Number of the repetition, such as the microbatch or the attempt; 0 for work that runs
    once."""
    src: IntArray
    """Source device of a transfer; -1 for work."""
    ready_s: FloatArray
    """Time at which all inputs of the span were available."""
    start_s: FloatArray
    end_s: FloatArray
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
        """Fraction of all devices' time in which they do not compute: in a pipeline, its bubble."""
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
        """Tensor of each transfer; a tensor is sent to a device once."""
        return self.what[self.num_works :]

    @property
    def transfer_src(self) -> IntArray:
        """Source device of each transfer."""
        return self.src[self.num_works :]

    @property
    def transfer_dst(self) -> IntArray:
        """Destination device of each transfer."""
        return self.device[self.num_works :]

    @property
    def transfer_ready_s(self) -> FloatArray:
        """Time at which each transfer's tensor was ready to be sent."""
        return self.ready_s[self.num_works :]

    @property
    def transfer_start_s(self) -> FloatArray:
        """Start of each transfer."""
        return self.start_s[self.num_works :]

    @property
    def transfer_end_s(self) -> FloatArray:
        """End of each transfer."""
        return self.end_s[self.num_works :]


def _covered_s(start_s: FloatArray, end_s: FloatArray) -> float:
    """Return the seconds that at least one span covers."""
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
    """Return the timeline of one step of a graph; its makespan is at least ``least_s``."""
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
