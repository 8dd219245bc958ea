"""Marks in time on a processor and on a CUDA device."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hocket.cost.timing import host_clock


class HostClock:
    """Marks in time on a processor, where the host does the work itself."""

    def __init__(self) -> None:
        self._marks: dict[str, Any] = {}

    def _now(self) -> Any:
        return host_clock()()

    def between(self, first: Any, second: Any) -> float:
        return float(second - first)

    def finish(self) -> None:
        """Wait until all marks have passed."""

    def mark(self, name: str) -> None:
        self._marks[name] = self._now()

    def marks(self) -> dict[str, Any]:
        done, self._marks = self._marks, {}
        return done

    def seconds(self, marks: dict[str, Any]) -> dict[str, float]:
        """Time before each mark since the one before it."""
        names = list(marks)
        return {
            name: self.between(marks[before], marks[name])
            for before, name in itertools.pairwise(names)
        }


class CudaClock(HostClock):
    """Marks in the stream of a CUDA device."""

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) * 1e-3

    def finish(self) -> None:
        torch.cuda.synchronize()
