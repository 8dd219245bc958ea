"""Heartbeat and position of a worker, in shared memory that outlives the worker."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

from hocket.base.units import format_percent

BEAT_S = 0.2
"""Interval of heartbeats."""


class Position(NamedTuple):
    """Last reported step and instruction of a worker."""

    beat_s: float
    """Time of its last heartbeat on the monotonic clock; 0 before the first."""
    step: int
    """0 before the first step."""
    instruction: int
    """Index within the step; its unit depends on the work."""


def how_far(positions: Sequence[Position], counts: Sequence[int], steps: int) -> str:
    """Describe the step of the slowest worker and the completed fraction of it."""
    step = min(position.step for position in positions)
    if not step:
        return "starting the processes"
    done = sum(
        count if position.step > step else min(position.instruction, count)
        for position, count in zip(positions, counts, strict=True)
    )
    return f"step {step} of {steps}: {format_percent(done / max(sum(counts), 1))}"


class Heartbeat:
    """Shared memory written by a worker and read by its parent."""

    SIZE = 24
    _beat = struct.Struct("=d")
    _place = struct.Struct("=qq")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def beat(self, now_s: float) -> None:
        """Record a heartbeat."""
        self._beat.pack_into(self._memory, 0, now_s)

    def move(self, step: int, instruction: int) -> None:
        """Record the current position."""
        self._place.pack_into(self._memory, 8, step, instruction)

    def read(self) -> Position:
        """Return the last recorded position."""
        return Position(
            self._beat.unpack_from(self._memory, 0)[0], *self._place.unpack_from(self._memory, 8)
        )

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
