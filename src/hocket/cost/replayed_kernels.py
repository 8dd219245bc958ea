"""Attribute the kernels of a profiled CUDA graph replay to the calls that launched them.

A graph captured on one stream runs its calls one after the other, so the kernels of a trace in time
order are those of the calls in order. A call takes the time of its kernels plus, per kernel, an
equal part of the gaps: the unprofiled step time minus the time of all kernels. A kernel fills the
fraction of a device given by its thread blocks over the blocks that can be resident at once, which
threads, registers and shared memory per block limit (NVIDIA's occupancy calculation). The median
over replays and equal calls is used, because a kernel delayed by another process takes hundreds of
times as long. O(kernels log kernels).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_SEEDS = 2
"""Kernels with which PyTorch sets seed and offset before it replays a graph that draws numbers."""
_WARP, _NUM_PARTITIONS, _MOST_BLOCKS = 32, 4, 32
"""Threads of a warp, register partitions of a multiprocessor, and most resident blocks."""
_REGISTERS_UNIT, _SHARED_UNIT_BYTES, _OWN_SHARED_BYTES = 256, 128, 1024
"""Allocation units of registers per warp and of shared memory per block, and shared memory that the
system reserves per block."""


class ChipLimits(NamedTuple):
    """Occupancy limits of a device."""

    multiprocessors: int
    threads: int
    """Resident threads per multiprocessor; the following limits are per multiprocessor too."""
    registers: int
    shared_bytes: int


class KernelRun(NamedTuple):
    """One run of a kernel, a copy or a memset."""

    start_us: float
    length_us: float
    blocks: int = 0
    """Thread blocks; 0 for copies and memsets, which use no multiprocessor."""
    threads: int = 1
    """Threads per block; the following figures are per block too, except registers."""
    registers: int = 0
    """Registers per thread."""
    shared_bytes: int = 0

    def fill(self, chip: ChipLimits) -> float:
        """Fraction of the device that the kernel occupies."""
        places = chip.multiprocessors * _blocks_at_once(self, chip)
        return min(1.0, self.blocks / places)


class InPlace(NamedTuple):
    """Measurements of a call in a replayed step."""

    seconds: float
    """Time with the gap to the next kernel."""
    kernels: int
    fill: float
    """Mean fraction of the device that its kernels occupy, weighted by time."""
    beside: float | None = None
    """Slowdown with a second step running concurrently; None if not measured."""


def kernels_of(trace: Mapping[str, Any]) -> list[KernelRun]:
    """Kernels on the device by start time, from a trace exported by PyTorch's profiler."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_EVENTS:
            launch = event.get("args", {})
            found.append(
                KernelRun(
                    float(event["ts"]),
                    float(event["dur"]),
                    prod(launch["grid"]) if "grid" in launch else 0,
                    prod(launch.get("block", ())),
                    int(launch.get("registers per thread", 0)),
                    int(launch.get("shared memory", 0)),
                )
            )
    return sorted(found)


def in_place(
    kernels: Sequence[KernelRun],
    num_replays: int,
    nodes: Sequence[int],
    keys: Sequence[str],
    step_s: float,
    chip: ChipLimits,
) -> dict[str, InPlace]:
    """Measurements by call key; calls have ``nodes`` graph nodes each and may share keys.

    ``kernels`` are those of all replays, ``step_s`` is one replay without the profiler. Raises
    `ValueError` if the trace does not match the calls.
    """
    size = sum(nodes)
    each, rest = divmod(len(kernels), num_replays)
    # Graphs that draw random numbers have two more kernels per replay.
    if not size or rest or each - size not in (0, _SEEDS):
        raise ValueError(
            f"the trace has {len(kernels)} kernels, {num_replays} replays have {size} each"
        )
    busy_us: dict[str, list[float]] = {}
    fills: dict[str, list[float]] = {}
    count = dict(zip(keys, nodes, strict=True))
    for end in range(each, len(kernels) + 1, each):
        at = end - size
        for key, num in zip(keys, nodes, strict=True):
            own = kernels[at : at + num]
            at += num
            busy_us.setdefault(key, []).append(_covered_us(own))
            fills.setdefault(key, []).append(_mean_fill(own, chip))
    # The median, because a kernel delayed by another process takes hundreds of times as long.
    busy_s = {key: 1e-6 * statistics.median(each) for key, each in busy_us.items()}
    gap_s = max(0.0, step_s - sum(busy_s[key] for key in keys)) / size
    return {
        key: InPlace(busy_s[key] + gap_s * count[key], count[key], statistics.median(fills[key]))
        for key in busy_s
        if count[key]
    }


def _covered_us(kernels: Iterable[KernelRun]) -> float:
    """Time in which at least one kernel runs; libraries run some kernels concurrently."""
    covered = end = 0.0
    for kernel in kernels:
        stop = kernel.start_us + kernel.length_us
        covered += max(0.0, stop - max(kernel.start_us, end))
        end = max(end, stop)
    return covered


def _mean_fill(kernels: Sequence[KernelRun], chip: ChipLimits) -> float:
    total_us = sum(kernel.length_us for kernel in kernels)
    filled_us = sum(kernel.length_us * kernel.fill(chip) for kernel in kernels)
    return filled_us / total_us if total_us else 0.0


def _blocks_at_once(kernel: KernelRun, chip: ChipLimits) -> int:
    """Resident blocks per multiprocessor, at least one."""
    warps = ceil(kernel.threads / _WARP)
    most = [_MOST_BLOCKS, chip.threads // _WARP // warps]
    if kernel.registers:
        unit = _rounded(kernel.registers * _WARP, _REGISTERS_UNIT)
        most.append(_NUM_PARTITIONS * (chip.registers // _NUM_PARTITIONS // unit) // warps)
    held = _rounded(kernel.shared_bytes + _OWN_SHARED_BYTES, _SHARED_UNIT_BYTES)
    most.append(chip.shared_bytes // held)
    return max(1, min(most))


def _rounded(number: int, unit: int) -> int:
    return ceil(number / unit) * unit
