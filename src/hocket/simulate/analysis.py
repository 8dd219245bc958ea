"""What a timeline says: who is busy, what the step waits for, what limits it.

The critical path is walked backwards from the last end: each op started when its last input came or
when its device was free, each transfer when its tensor was made. O(ops + reads + transfers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hocket.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline

StepKind = Literal["op", "transfer"]
Reason = Literal["start", "data", "device", "link"]


@dataclass(frozen=True)
class PathStep:
    """One op or transfer of the critical path."""

    kind: StepKind
    index: int
    """Op, or position among the timeline's transfers."""
    start_s: float
    end_s: float
    reason: Reason
    """Why it did not start (for ``link``: end) earlier: it is the first, it waited for data, for
    its device, or for other transfers on its way."""
    wait_s: float
    """For ``device`` and ``link`` how long it was held up, for ``data`` its device's idle time."""


def device_busy_s(timeline: Timeline) -> FloatArray:
    """Seconds that each device computes."""
    busy = np.zeros(timeline.num_devices)
    np.add.at(busy, timeline.op_device, timeline.op_end_s - timeline.op_start_s)
    return busy


def channel_busy_s(timeline: Timeline, problem: Problem) -> FloatArray:
    """Seconds during which at least one transfer is on each channel."""
    routes = problem.costs.routes
    pair = timeline.transfer_src.astype(np.int64) * timeline.num_devices + timeline.transfer_dst
    length = np.diff(routes.path_ptr)[pair]
    transfer = np.repeat(np.arange(len(pair)), length)
    within = np.arange(len(transfer)) - np.repeat(np.cumsum(length) - length, length)
    channel = routes.path_channels[np.repeat(routes.path_ptr[pair], length) + within]
    busy = np.zeros(len(routes.channel_names))
    order = np.lexsort((timeline.transfer_start_s[transfer], channel))
    for number in np.unique(channel):
        mine = transfer[order][channel[order] == number]
        start, end = timeline.transfer_start_s[mine], timeline.transfer_end_s[mine]
        reached = np.maximum.accumulate(np.concatenate(([0.0], end[:-1])))
        busy[number] = np.maximum(end - np.maximum(start, reached), 0.0).sum()
    return busy


def critical_path(timeline: Timeline, problem: Problem) -> tuple[PathStep, ...]:
    """The chain of ops and transfers that makes the step as long as it is, first to last."""
    if not len(timeline.op_end_s):
        return ()
    walk = _Walk(timeline, problem)
    step: PathStep | None = walk.last()
    path: list[PathStep] = []
    while step is not None:
        path.append(step)
        step = walk.before(step)
    return tuple(reversed(path))


def bottleneck(timeline: Timeline, problem: Problem) -> str:
    """One sentence on what limits the step: the busiest device or channel."""
    if timeline.makespan_s <= 0:
        return ""
    devices = device_busy_s(timeline) / timeline.makespan_s
    channels = channel_busy_s(timeline, problem) / timeline.makespan_s
    device = int(np.argmax(devices))
    if len(channels) and channels.max() > devices[device]:
        channel = int(np.argmax(channels))
        name = problem.costs.routes.channel_names[channel]
        return f"limited by the link {name} ({channels[channel]:.0%} busy)"
    name = problem.cluster.device_names[device]
    return f"limited by compute on {name} ({devices[device]:.0%} busy)"


class _Walk:
    """Lookups for walking a timeline backwards."""

    def __init__(self, timeline: Timeline, problem: Problem) -> None:
        self.timeline, self.problem = timeline, problem
        order = np.lexsort((np.arange(len(timeline.op_end_s)), timeline.op_start_s))
        by_device = order[np.argsort(timeline.op_device[order], kind="stable")]
        same = timeline.op_device[by_device][1:] == timeline.op_device[by_device][:-1]
        self.previous: IntArray = np.full(len(order), -1, dtype=np.int32)
        """The op that ran on the same device before each op."""
        self.previous[by_device[1:][same]] = by_device[:-1][same]
        arrival = zip(
            timeline.transfer_tensor.tolist(), timeline.transfer_dst.tolist(), strict=True
        )
        self.transfer_to = {key: position for position, key in enumerate(arrival)}

    def last(self) -> PathStep:
        """The op or transfer that ends last; an op where both do."""
        timeline = self.timeline
        op = int(np.argmax(timeline.op_end_s))
        if len(timeline.transfer_end_s) and timeline.transfer_end_s.max() > timeline.op_end_s[op]:
            return self._transfer_step(int(np.argmax(timeline.transfer_end_s)))
        return self._op_step(op)

    def before(self, step: PathStep) -> PathStep | None:
        """What the step waited for."""
        if step.reason == "start":
            return None
        if step.kind == "transfer":
            tensor = self.timeline.transfer_tensor[step.index]
            producer = int(self.problem.graph.tensor_producer[tensor])
            return self._op_step(producer) if producer >= 0 else None
        if step.reason == "device":
            return self._op_step(int(self.previous[step.index]))
        _, cause = self._last_input(step.index)
        if cause is None:
            return None
        kind, index = cause
        return self._op_step(index) if kind == "op" else self._transfer_step(index)

    def _last_input(self, op: int) -> tuple[float, tuple[StepKind, int] | None]:
        """When the last input of an op was there, and what brought it."""
        latest, cause = 0.0, None
        device = int(self.timeline.op_device[op])
        for tensor in self.problem.graph.reads_of(op).tolist():
            arrived = self.transfer_to.get((tensor, device))
            producer = int(self.problem.graph.tensor_producer[tensor])
            if arrived is not None:
                when, what = self.timeline.transfer_end_s[arrived], ("transfer", arrived)
            elif producer >= 0:
                when, what = self.timeline.op_end_s[producer], ("op", producer)
            else:
                continue
            if cause is None or when > latest:
                latest, cause = float(when), what
        return latest, cause  # type: ignore[return-value]

    def _op_step(self, op: int) -> PathStep:
        start, end = float(self.timeline.op_start_s[op]), float(self.timeline.op_end_s[op])
        previous = int(self.previous[op])
        free = float(self.timeline.op_end_s[previous]) if previous >= 0 else 0.0
        arrived, cause = self._last_input(op)
        if cause is not None and (arrived >= start or previous < 0):
            return PathStep("op", op, start, end, "data", max(start - free, 0.0))
        if previous >= 0:
            return PathStep("op", op, start, end, "device", max(start - arrived, 0.0))
        return PathStep("op", op, start, end, "start", start)

    def _transfer_step(self, index: int) -> PathStep:
        timeline = self.timeline
        ready, start = float(timeline.transfer_ready_s[index]), timeline.transfer_start_s[index]
        end = float(timeline.transfer_end_s[index])
        tensor, src, dst = (
            int(column[index])
            for column in (timeline.transfer_tensor, timeline.transfer_src, timeline.transfer_dst)
        )
        alone_s = self.problem.costs.transfer_s(tensor, src, dst)
        held_up_s = end - ready - alone_s
        if self.problem.graph.tensor_producer[tensor] < 0:
            return PathStep("transfer", index, float(start), end, "start", max(held_up_s, 0.0))
        reason: Reason = "link" if held_up_s > 1e-9 * max(end, alone_s) else "data"
        return PathStep("transfer", index, float(start), end, reason, max(held_up_s, 0.0))
