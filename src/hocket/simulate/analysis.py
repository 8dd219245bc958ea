"""What a timeline says: how busy devices and channels are, and what limits the step.

O(n log n) in the number of spans.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.units import format_percent
from hocket.graph.graph import Stream
from hocket.plan.problem import Problem
from hocket.simulate.path import PathStep, Reason, critical_path
from hocket.simulate.timeline import Timeline

__all__ = [
    "PathStep",
    "PathSummary",
    "Reason",
    "bottleneck",
    "channel_busy_s",
    "critical_path",
    "crossings",
    "price_per_hour",
    "summarize",
    "used_devices",
]

TOGETHER = (Stream.COMMUNICATION,)
"""Where devices gather, scatter or sum together."""
COPYING = (Stream.COPY_IN, Stream.COPY_OUT)
AT_HOME = (Stream.HOST,)
_MOSTLY = 0.5
"""A device that computes for at least this share of the step is said to limit it."""


@dataclass(frozen=True)
class PathSummary:
    """Where the time of a critical path goes, and why its devices stood idle."""

    compute_s: float
    transfer_s: float
    wait_s: dict[Reason, float]
    """Seconds waited per reason; see `PathStep.wait_s`. Waits overlap other steps of the path."""


def summarize(path: Sequence[PathStep]) -> PathSummary:
    """Add up the steps of a critical path."""
    length_s = {"op": 0.0, "transfer": 0.0}
    wait_s: dict[Reason, float] = {"data": 0.0, "device": 0.0, "link": 0.0}
    for step in path:
        length_s[step.kind] += step.end_s - step.start_s
        if step.reason != "start":
            wait_s[step.reason] += step.wait_s
    return PathSummary(compute_s=length_s["op"], transfer_s=length_s["transfer"], wait_s=wait_s)


def channel_busy_s(timeline: Timeline, problem: Problem) -> FloatArray:
    """Seconds during which at least one transfer is on each channel."""
    transfer, channel = crossings(timeline, problem)
    start_s, end_s = timeline.transfer_start_s[transfer], timeline.transfer_end_s[transfer]
    order = np.lexsort((start_s, channel))
    start_s, end_s, channel = start_s[order], end_s[order], channel[order]
    num_channels = len(problem.costs.routes.channel_names)
    begin = np.searchsorted(channel, np.arange(num_channels + 1))
    busy_s = np.zeros(num_channels)
    for index in range(num_channels):
        part = slice(begin[index], begin[index + 1])
        covered_s = np.maximum.accumulate(np.concatenate(([0.0], end_s[part])))
        busy_s[index] = np.maximum(
            covered_s[1:] - np.maximum(start_s[part], covered_s[:-1]), 0
        ).sum()
    return busy_s


def crossings(timeline: Timeline, problem: Problem) -> tuple[IntArray, IntArray]:
    """Pairs (transfer, channel): which transfers cross which channels."""
    routes = problem.costs.routes
    pair = timeline.transfer_src.astype(np.int64) * timeline.num_devices + timeline.transfer_dst
    first, length = routes.path_ptr[pair], routes.path_ptr[pair + 1] - routes.path_ptr[pair]
    transfer = np.repeat(np.arange(len(pair), dtype=np.int32), length)
    step = np.arange(len(transfer)) - np.repeat(np.cumsum(length) - length, length)
    return transfer, routes.path_channels[first[transfer] + step]


def bottleneck(timeline: Timeline, problem: Problem, path: Sequence[PathStep] | None = None) -> str:
    """One sentence: what keeps the step from being shorter.

    ``path`` is the critical path, where the caller has it: finding it is most of the work.
    """
    whole_s = timeline.makespan_s
    if whole_s <= 0:
        return "limited by nothing: the step takes no time"
    path = critical_path(timeline, problem) if path is None else path
    summary = summarize(path)
    beside = {
        "exchanges between devices": streams_s(timeline, path, TOGETHER),
        "copies to and from the host": streams_s(timeline, path, COPYING),
        "updates on the host": streams_s(timeline, path, AT_HOME),
    }
    most_s, what = max((seconds, what) for what, seconds in beside.items())
    if most_s > max(summary.transfer_s, summary.compute_s - sum(beside.values())):
        return f"limited by {what} ({format_percent(most_s / whole_s)})"
    if summary.transfer_s > summary.compute_s:
        channel, busy_s = _path_channel(timeline, problem, path)
        return f"limited by the link {channel} ({format_percent(busy_s / whole_s)} busy)"
    compute_s = timeline.busy_s
    device = int(np.argmax(compute_s))
    name, share = problem.cluster.device_names[device], float(compute_s[device]) / whole_s
    if share >= _MOSTLY:
        return f"limited by compute on {name} ({format_percent(share)} busy)"
    return (
        "limited by ops that wait for each other across devices "
        f"(the busiest, {name}, is {format_percent(share)} busy)"
    )


def streams_s(timeline: Timeline, path: Sequence[PathStep], streams: Collection[Stream]) -> float:
    """Seconds of the path on some streams of devices."""
    return sum(
        step.end_s - step.start_s
        for step in path
        if step.kind == "op" and timeline.stream[step.index] in streams
    )


def _path_channel(
    timeline: Timeline, problem: Problem, path: Sequence[PathStep]
) -> tuple[str, float]:
    """Name and busy seconds of the channel that limits the transfers of the path for longest.

    On each route that is the channel with the least bandwidth; of equal ones the busier.
    """
    routes = problem.costs.routes
    busy_s = channel_busy_s(timeline, problem)
    capacity = problem.costs.channel_capacity()
    on_path_s = np.zeros(len(busy_s))
    for step in path:
        if step.kind == "transfer":
            src, dst = timeline.transfer_src[step.index], timeline.transfer_dst[step.index]
            channels = routes.path(int(src), int(dst)).tolist()
            narrow = min(channels, key=lambda c: (capacity[c], -busy_s[c], c))
            on_path_s[narrow] += step.end_s - step.start_s
    channel = int(np.argmax(on_path_s))
    return routes.channel_names[channel], float(busy_s[channel])


def used_devices(timeline: Timeline) -> list[int]:
    """Devices that compute."""
    used: list[int] = np.unique(timeline.op_device).tolist()
    return used


def price_per_hour(problem: Problem, timeline: Timeline) -> float | None:
    """Dollars per hour of the devices that compute; None where one of them has no price."""
    devices = problem.cluster.devices
    prices = [devices[device].kind.price_per_hour for device in used_devices(timeline)]
    return sum(prices) if prices and all(price > 0 for price in prices) else None
