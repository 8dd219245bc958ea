"""A sign of life and a position, in memory that outlives the process that writes them."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

from hocket.base.units import format_percent

BEAT_S = 0.2
"""How often a process shows that it lives."""


class Position(NamedTuple):
    """Where a process was when it last said so."""

    beat_s: float
    """Time of its last sign of life on the monotonic clock; 0 before the first."""
    step: int
    """0 before the first step."""
    instruction: int
    """Of the step; what is counted is for each kind of work to say."""


def how_far(positions: Sequence[Position], counts: Sequence[int], steps: int) -> str:
    """The step that the slowest process is in, and how much of it all have done."""
    step = min(position.step for position in positions)
    if not step:
        return "starting the processes"
    done = sum(
        count if position.step > step else min(position.instruction, count)
        for position, count in zip(positions, counts, strict=True)
    )
    return f"step {step} of {steps}: {format_percent(done / max(sum(counts), 1))}"


class SignsOfLife:
    """The memory that a process writes and the one that started it reads."""

    SIZE = 24
    _beat = struct.Struct("=d")
    _place = struct.Struct("=qq")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def beat(self, now_s: float) -> None:
        """Show that the process lives."""
        self._beat.pack_into(self._memory, 0, now_s)

    def move(self, step: int, instruction: int) -> None:
        """Show what the process does now."""
        self._place.pack_into(self._memory, 8, step, instruction)

    def read(self) -> Position:
        """What was last shown."""
        return Position(
            self._beat.unpack_from(self._memory, 0)[0], *self._place.unpack_from(self._memory, 8)
        )

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
