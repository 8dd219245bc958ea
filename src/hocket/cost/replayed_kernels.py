"""Kernels of each call in a profiled replay of a captured step.

The calls of a graph that was captured on one stream run one after the other, so the kernels of a
trace in order of time are those of its calls in order. A call takes as long as its kernels run in
their place, and for each of them the gap to the next: what the step takes without the profiler
beyond all kernels, shared out. A kernel fills as much of a device as it has blocks of threads of
those that can be there at once, which threads, registers and shared memory of a block decide
(NVIDIA's occupancy calculation). Of several replays and of equal calls the median counts: a kernel
that another process held up is hundreds of times as long. O(kernels log kernels).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_SEEDS = 2
"""Kernels with which PyTorch sets seed and offset before a graph that draws numbers is replayed."""
_WARP, _NUM_PARTITIONS, _MOST_BLOCKS = 32, 4, 32
"""Threads of a warp, the parts of a multiprocessor that have registers of their own, and blocks
that it takes at most."""
_REGISTERS_UNIT, _SHARED_UNIT_BYTES, _OWN_SHARED_BYTES = 256, 128, 1024
"""Registers of a warp and shared memory of a block are given out in these; each block takes some
for itself."""


class ChipLimits(NamedTuple):
    """Capacity of a device."""

    multiprocessors: int
    threads: int
    """Of one multiprocessor, as those that follow."""
    registers: int
    shared_bytes: int


class KernelRun(NamedTuple):
    """One run of a kernel, a copy or a memset."""

    start_us: float
    length_us: float
    blocks: int = 0
    """0 of copies and memsets, which take no multiprocessor."""
    threads: int = 1
    """Of a block, as those that follow."""
    registers: int = 0
    """Of a thread."""
    shared_bytes: int = 0

    def fill(self, chip: ChipLimits) -> float:
        """The part of a device that it takes."""
        places = chip.multiprocessors * _blocks_at_once(self, chip)
        return min(1.0, self.blocks / places)


class InPlace(NamedTuple):
    """A call in a replayed step."""

    seconds: float
    """With the gap to the next kernel."""
    kernels: int
    fill: float
    """Of a device, the mean over the time of its kernels."""
    beside: float | None = None
    """Slowdown of the step with a second one in a row of its own beside it; None
    where not measured."""


def kernels_of(trace: Mapping[str, Any]) -> list[KernelRun]:
    """Kernels on the device, by start; ``trace`` is as PyTorch's profiler exports it."""
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
    """By key of a call, what it takes; calls have so many ``nodes`` and may have equal ``keys``.

    ``kernels`` are those of all replays, ``step_s`` is one replay without the profiler. Raises
    `ValueError` where the trace is not of these calls.
    """
    size = sum(nodes)
    each, rest = divmod(len(kernels), num_replays)
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
    busy_s = {key: 1e-6 * statistics.median(each) for key, each in busy_us.items()}
    gap_s = max(0.0, step_s - sum(busy_s[key] for key in keys)) / size
    return {
        key: InPlace(busy_s[key] + gap_s * count[key], count[key], statistics.median(fills[key]))
        for key in busy_s
        if count[key]
    }


def _covered_us(kernels: Iterable[KernelRun]) -> float:
    """Time in which at least one runs: libraries put some beside each other."""
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
    """Blocks that a multiprocessor takes at once, at least one."""
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
