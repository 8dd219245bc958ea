"""Devices of each type that are free from now on, as steps in time, with what is reserved of them.

O(steps) for every question and every change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel


class Timeline(NamedTuple):
    """Free devices by type and time: ``free[type, k]`` from ``time_s[type, k]`` on."""

    time_s: FloatArray
    free: FloatArray
    size: LongArray
    """``[type]``: steps; one number more says whether the timeline is in use."""


@kernel
def begin(timeline: Timeline, kind: int, time_s: float, num_free: int) -> None:
    """Begin with what is free now."""
    timeline.size[kind] = 1
    timeline.time_s[kind, 0] = time_s
    timeline.free[kind, 0] = num_free


@kernel
def step_at(timeline: Timeline, kind: int, time_s: float) -> int:
    """The step that begins at a moment, made where there is none; the moment is not in the past."""
    size: int = timeline.size[kind]
    at = size
    while at > 0 and timeline.time_s[kind, at - 1] >= time_s:
        at -= 1
    if at < size and timeline.time_s[kind, at] == time_s:
        return at
    for later in range(size, at, -1):
        timeline.time_s[kind, later] = timeline.time_s[kind, later - 1]
        timeline.free[kind, later] = timeline.free[kind, later - 1]
    timeline.time_s[kind, at] = time_s
    timeline.free[kind, at] = timeline.free[kind, at - 1]
    timeline.size[kind] = size + 1
    return at


@kernel
def add(timeline: Timeline, kind: int, count: int, start_s: float, end_s: float) -> None:
    """Add free devices from one moment to another; fewer than none takes them."""
    if start_s == np.inf or end_s <= start_s:
        return
    first = step_at(timeline, kind, start_s)
    last = timeline.size[kind] if end_s == np.inf else step_at(timeline, kind, end_s)
    for at in range(first, last):
        timeline.free[kind, at] += count


@kernel
def earliest_s(timeline: Timeline, kind: int, count: int, duration_s: float) -> float:
    """The first moment from which on so many devices are free for so long; infinite for never."""
    start_s, size = np.inf, timeline.size[kind]
    for at in range(size):
        if start_s < np.inf and timeline.time_s[kind, at] >= start_s + duration_s:
            return start_s
        if timeline.free[kind, at] < count:
            start_s = np.inf
        elif start_s == np.inf:
            start_s = timeline.time_s[kind, at]
    return start_s


@kernel
def after_now_s(timeline: Timeline, kind: int) -> float:
    """The first moment at which more devices are free than now; infinite for never."""
    for at in range(1, timeline.size[kind]):
        if timeline.free[kind, at] > timeline.free[kind, 0]:
            return float(timeline.time_s[kind, at])
    return np.inf


@kernel
def close(timeline: Timeline, kind: int) -> None:
    """Let nothing be free, ever: nobody knows when enough will be."""
    for at in range(timeline.size[kind]):
        timeline.free[kind, at] = 0.0
