"""Heartbeat and current step of a worker, in shared memory that outlives the worker."""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

BEAT_S = 0.2
"""Seconds between heartbeats."""


class Position(NamedTuple):
    """Last heartbeat and current step of a worker."""

    beat_s: float
    """Time of the last heartbeat on the monotonic clock; 0 before the first."""
    step: int
    """Current step; 0 before the first."""


class Heartbeat:
    """Shared memory written by a worker and read by its parent."""

    SIZE = 16
    _beat = struct.Struct("=d")
    _step = struct.Struct("=q")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def beat(self, now_s: float) -> None:
        """Record a heartbeat."""
        self._beat.pack_into(self._memory, 0, now_s)

    def move(self, step: int) -> None:
        """Record the current step."""
        self._step.pack_into(self._memory, 8, step)

    def read(self) -> Position:
        """Return the last recorded position."""
        beats = self._beat.unpack_from(self._memory, 0)
        return Position(*beats, *self._step.unpack_from(self._memory, 8))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
