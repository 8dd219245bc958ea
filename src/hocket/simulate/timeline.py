"""The Timeline: what happened or would happen, as arrays of spans and memory curves."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.arrays import ByteArray, FloatArray, IntArray
from hocket.units import format_seconds


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Spans of ops and transfers, and the bytes held on each device over time.

    Made by the simulator, and in the same form by a measured run. Times start at 0.
    """

    makespan_s: float
    """End of the last op or transfer."""
    op_device: IntArray
    op_start_s: FloatArray
    op_end_s: FloatArray
    transfer_tensor: IntArray
    """Transfers in order of (start, tensor, destination); a tensor goes to a device once."""
    transfer_src: IntArray
    transfer_dst: IntArray
    transfer_ready_s: FloatArray
    """When the tensor was there to be sent."""
    transfer_start_s: FloatArray
    transfer_end_s: FloatArray
    memory_ptr: ByteArray
    """Curve of device d: entries ``memory_ptr[d]`` up to ``memory_ptr[d + 1]``."""
    memory_time_s: FloatArray
    """Ascending per device, first entry 0, no two entries of a device at one time."""
    memory_bytes: ByteArray
    """Bytes held from that time on. At one instant releases come before allocations; an instant
    whose highest value is not its last is seen in ``peak_bytes``, not in the curve."""
    peak_bytes: ByteArray
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

    def memory_curve(self, device: int) -> tuple[FloatArray, ByteArray]:
        """Times and bytes held from each of them on."""
        part = slice(int(self.memory_ptr[device]), int(self.memory_ptr[device + 1]))
        return self.memory_time_s[part], self.memory_bytes[part]
