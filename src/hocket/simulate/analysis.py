"""Analysis of a timeline: its critical path, its bottleneck and the use of devices and channels.

The critical path is the chain of ops and transfers that makes the step as long as it is. The search
starts at the span that ends last and walks back to a span that ended when its successor started and
that the successor had to wait for: the producer of a tensor, the op before it on the device, or a
transfer ahead in the queue. Several spans of no length at one instant can lead to a dead end; the
search then tries the next cause. O(n log n) in the number of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.units import format_percent
from hocket.graph.graph import Stream
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline, covered_s

Reason = Literal["start", "data", "device", "link"]


@dataclass(frozen=True)
class PathStep:
    """An op or a transfer on the critical path, and why it did not start earlier."""

    kind: Literal["op", "transfer"]
    index: int
    """Op number, or position of a transfer among the timeline's transfers."""
    start_s: float
    end_s: float
    reason: Reason
    """Cause that the step waited for last. ``start``: nothing; ``data``: a tensor was computed or
    sent; ``device``: the device ran another op; ``link``: another transfer came first."""
    wait_s: float
    """Seconds for which the device was idle (``data``), the op's inputs were complete (``device``)
    or the tensor was ready to be sent (``link``) before the step started."""


class _Cause(NamedTuple):
    item: int
    """Op number, or the number of ops plus the position of a transfer."""
    reason: Reason
    wait_s: float


def critical_path(timeline: Timeline, problem: Problem) -> tuple[PathStep, ...]:
    """Return the consecutive ops and transfers from the start to the end of the step."""
    num_ops = problem.graph.num_ops
    start_s = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))
    end_s = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))
    if not len(end_s):
        return ()
    causes = _Causes(timeline, problem)
    steps: list[PathStep] = []
    # The span that ends last determines the step time.
    for item, reason, wait_s in _walk(int(np.argmax(end_s)), causes):
        is_op = item < num_ops
        steps.append(
            PathStep(
                kind="op" if is_op else "transfer",
                index=item if is_op else item - num_ops,
                start_s=float(start_s[item]),
                end_s=float(end_s[item]),
                reason=reason,
                wait_s=wait_s,
            )
        )
    return tuple(reversed(steps))


def _walk(last: int, causes: _Causes) -> list[tuple[int, Reason, float]]:
    """Search depth-first from the last item back to one without a cause.

    Returns (item, reason, wait) of each item on the path found.
    """
    trail: list[tuple[int, Reason, float]] = [(last, "start", 0.0)]
    untried = [causes.of(last)]
    seen = {last}
    while True:
        item = trail[-1][0]
        # Spans of no length may form cycles, so no item is visited twice.
        cause = next((c for c in untried[-1] if c.item not in seen), None)
        if cause is not None:
            trail[-1] = (item, cause.reason, cause.wait_s)
            seen.add(cause.item)
            trail.append((cause.item, "start", 0.0))
            untried.append(causes.of(cause.item))
        elif not untried[-1] or len(trail) == 1:
            return trail
        else:
            trail.pop()
            untried.pop()


class _Causes:
    """Finds the spans that ops and transfers waited for; transfers are numbered after the ops."""

    def __init__(self, timeline: Timeline, problem: Problem) -> None:
        graph = problem.graph
        self.num_ops = graph.num_ops
        op_start_s, op_end_s = timeline.op_start_s, timeline.op_end_s
        self.start_s: list[float] = np.append(op_start_s, timeline.transfer_start_s).tolist()
        self.end_s: list[float] = np.append(op_end_s, timeline.transfer_end_s).tolist()
        self.ready_s: list[float] = timeline.transfer_ready_s.tolist()
        self.producer: list[int] = graph.tensor_producer[timeline.transfer_tensor].tolist()
        self.read_ptr: list[int] = graph.read_ptr.tolist()
        self.read_from: list[int] = _read_from(timeline, problem).tolist()
        ops = np.arange(graph.num_ops)
        queue = timeline.op_device.astype(np.int64) * len(Stream) + graph.op_stream
        self.on_stream = _Ended(ops, queue, op_start_s, op_end_s)
        self.in_queues: _Ended | None = None
        if problem.transfers == "queued":
            routes = problem.costs.routes
            send = routes.send_queue[timeline.transfer_src]
            receive = routes.receive_queue[timeline.transfer_dst]
            transfers = graph.num_ops + np.arange(len(send))
            # Each transfer is in two queues: entry k in its source's, entry len(send) + k in its
            # destination's.
            self.in_queues = _Ended(
                np.tile(transfers, 2), np.append(send, receive),
                np.tile(timeline.transfer_start_s, 2), np.tile(timeline.transfer_end_s, 2),
            )  # fmt: skip

    def of(self, item: int) -> list[_Cause]:
        """Return the items that ended last before an item could start; empty at step start."""
        if item >= self.num_ops:
            return self._of_transfer(item)
        return self._of_op(item) if self.start_s[item] > 0 else []

    def _of_op(self, op: int) -> list[_Cause]:
        start_s, end_s = self.start_s[op], self.end_s
        reads = self.read_from[self.read_ptr[op] : self.read_ptr[op + 1]]
        arrivals = [item for item in reads if item >= 0]
        before = self.on_stream.last_before(op, op)
        data_s = max((end_s[item] for item in arrivals), default=0.0)
        free_s = end_s[before[0]] if before else 0.0
        # The cause is whatever ended last: data if both ended together.
        if arrivals and data_s >= free_s:
            item = next(item for item in arrivals if end_s[item] == data_s)
            return [_Cause(item, "data", max(start_s - free_s, 0.0))]
        return [_Cause(item, "device", max(start_s - data_s, 0.0)) for item in before]

    def _of_transfer(self, item: int) -> list[_Cause]:
        transfer = item - self.num_ops
        wait_s = self.start_s[item] - self.ready_s[transfer]
        if wait_s > 0 and self.in_queues is not None:
            entries = transfer, transfer + len(self.ready_s)
            ahead = [o for at in entries for o in self.in_queues.last_before(at, item)]
            latest_s = max((self.end_s[other] for other in ahead), default=0.0)
            return [_Cause(o, "link", wait_s) for o in ahead if self.end_s[o] == latest_s]
        producer = self.producer[transfer]
        return [_Cause(producer, "link" if wait_s > 0 else "data", wait_s)] if producer >= 0 else []


def _read_from(timeline: Timeline, problem: Problem) -> NDArray[np.int64]:
    """Return, per entry of the graph's reads, the item that provides the tensor; -1 for none."""
    graph = problem.graph
    reader = graph.reader
    source = graph.tensor_producer[graph.reads].astype(np.int64)
    if not len(timeline.transfer_tensor):
        return source
    num = timeline.num_devices
    key = timeline.transfer_tensor.astype(np.int64) * num + timeline.transfer_dst
    order = np.argsort(key, kind="stable")
    wanted = graph.reads.astype(np.int64) * num + timeline.op_device[reader]
    # The search may point behind the last key; `is_sent` tells whether it hit.
    found = np.minimum(np.searchsorted(key[order], wanted), len(key) - 1)
    is_sent = key[order][found] == wanted
    return np.where(is_sent, graph.num_ops + order[found], source)


class _Ended:
    """Items sorted by group (a stream, a queue) and end, to find the items that ended last before a
    start.

    An item of length 0 can end at the start of an item that ran before it. So all items that ended
    at that time are returned, up to the first one with a length, which certainly ran before.
    """

    def __init__(
        self,
        items: NDArray[np.int64],
        group: NDArray[np.integer],
        start_s: FloatArray,
        end_s: FloatArray,
    ) -> None:
        has_length = end_s > start_s
        # Of equal ends, items with a length come last and are met first by the backward scan.
        order = np.lexsort((has_length, end_s, group))
        times, rank = np.unique(end_s, return_inverse=True)
        width = len(times) + 1
        key = group.astype(np.int64) * width + rank + 1
        query = group.astype(np.int64) * width + np.searchsorted(times, start_s, side="right")
        self.first: list[int] = np.searchsorted(key[order], group * np.int64(width)).tolist()
        self.stop: list[int] = np.searchsorted(key[order], query, side="right").tolist()
        self.items: list[int] = items[order].tolist()
        self.ends: list[float] = end_s[order].tolist()
        self.has_length: list[bool] = has_length[order].tolist()

    def last_before(self, index: int, item: int) -> list[int]:
        """Return items other than ``item`` that ended last before entry ``index`` starts."""
        found: list[int] = []
        end_s = 0.0
        for at in range(self.stop[index] - 1, self.first[index] - 1, -1):
            if self.items[at] == item:
                continue
            if found and self.ends[at] < end_s:
                break
            end_s = self.ends[at]
            found.append(self.items[at])
            if self.has_length[at]:
                break
        return found


COMPUTE, TRANSFERS, EXCHANGES, COPIES, HOST = (
    "compute", "transfers", "collectives", "copies", "updates on the host",
)  # fmt: skip
"""Kinds of spans on the critical path."""
_KIND_OF = {
    Stream.COMMUNICATION: EXCHANGES, Stream.COPY_IN: COPIES, Stream.COPY_OUT: COPIES,
    Stream.HOST: HOST,
}  # fmt: skip
_LIMITS = {
    EXCHANGES: "collectives between devices",
    COPIES: "copies to and from the host",
    HOST: HOST,
}
_MOSTLY = 0.5
"""Fraction of the step from which on a device that computes is reported as the bottleneck."""


def path_seconds(timeline: Timeline, path: Sequence[PathStep]) -> dict[str, float]:
    """Return the seconds of a critical path by kind of span."""
    seconds = dict.fromkeys((COMPUTE, TRANSFERS, EXCHANGES, COPIES, HOST), 0.0)
    stream = timeline.op_stream.tolist()
    for step in path:
        kind = TRANSFERS if step.kind == "transfer" else _KIND_OF.get(stream[step.index], COMPUTE)
        seconds[kind] += step.end_s - step.start_s
    return seconds


def channel_busy_s(timeline: Timeline, problem: Problem) -> FloatArray:
    """Return the seconds during which each channel carries at least one transfer."""
    transfer, channel = crossings(timeline, problem)
    spans = timeline.transfer_start_s[transfer], timeline.transfer_end_s[transfer]
    return covered_s(channel, *spans, len(problem.costs.routes.channel_names))


def crossings(timeline: Timeline, problem: Problem) -> tuple[IntArray, IntArray]:
    """Return pairs of a transfer and a channel that it crosses."""
    routes = problem.costs.routes
    pair = timeline.transfer_src.astype(np.int64) * timeline.num_devices + timeline.transfer_dst
    first, length = routes.path_ptr[pair], routes.path_ptr[pair + 1] - routes.path_ptr[pair]
    transfer = np.repeat(np.arange(len(pair), dtype=np.int32), length)
    step = np.arange(len(transfer)) - np.repeat(np.cumsum(length) - length, length)
    return transfer, routes.path_channels[first[transfer] + step]


def bottleneck(timeline: Timeline, problem: Problem, path: Sequence[PathStep] | None = None) -> str:
    """Return one sentence that names what limits the step time.

    ``path`` is the critical path if the caller has it, since finding it takes most of the time.
    """
    whole_s = timeline.makespan_s
    if whole_s <= 0:
        return "limited by nothing: the step takes no time"
    path = critical_path(timeline, problem) if path is None else path
    seconds = path_seconds(timeline, path)
    # Collectives, copies and the host count only if they exceed both compute and transfers.
    most = max(_LIMITS, key=lambda kind: seconds[kind])
    if seconds[most] > max(seconds[TRANSFERS], seconds[COMPUTE]):
        return f"limited by {_LIMITS[most]} ({format_percent(seconds[most] / whole_s)})"
    if seconds[TRANSFERS] > seconds[COMPUTE]:
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


def _path_channel(
    timeline: Timeline, problem: Problem, path: Sequence[PathStep]
) -> tuple[str, float]:
    """Return the channel that limits the path's transfers longest, and the channel's busy seconds.

    A transfer is limited by the channel with the least bandwidth on its route, and among equal
    channels by the busiest.
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
    """Return devices that run ops or hold bytes, including those for which another device was
    simulated."""
    holds = np.flatnonzero(timeline.peak_bytes > 0)
    used: list[int] = np.union1d(timeline.op_device, holds).tolist()
    return used


def price_per_hour(problem: Problem, timeline: Timeline) -> float | None:
    """Return dollars per hour of the devices that compute; None if any of them has no price."""
    devices = problem.cluster.devices
    prices = [devices[device].kind.price_per_hour for device in used_devices(timeline)]
    return sum(prices) if prices and all(price > 0 for price in prices) else None
