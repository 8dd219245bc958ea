"""The critical path: the chain of ops and transfers that makes the step as long as it is.

Walk back from what ends last to something that ended when it started and that it had to wait for: a
tensor, the device, or a transfer ahead in the queue. At an instant where several things of no
length happen, the walk may meet a dead end and then tries the next cause. O(n log n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hocket.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline

Reason = Literal["start", "data", "device", "link"]


@dataclass(frozen=True)
class PathStep:
    """An op or a transfer on the critical path, and why it did not start earlier."""

    kind: Literal["op", "transfer"]
    index: int
    """Number of the op, or position among the transfers of the timeline."""
    start_s: float
    end_s: float
    reason: Reason
    """``start``: nothing came before; ``data``: a tensor had to be made or to arrive; ``device``:
    another op ran; ``link``: another transfer was ahead."""
    wait_s: float
    """For ``data`` how long the device stood idle, for ``device`` how long the data was there, for
    ``link`` how long the tensor was there to be sent."""


@dataclass(frozen=True)
class _Cause:
    item: int
    """The op, or the number of ops plus the position of the transfer."""
    reason: Reason
    wait_s: float


def critical_path(timeline: Timeline, problem: Problem) -> tuple[PathStep, ...]:
    """The steps from the start to the end of the timeline, each right after the one before."""
    num_ops = problem.graph.num_ops
    start_s = np.concatenate((timeline.op_start_s, timeline.transfer_start_s))
    end_s = np.concatenate((timeline.op_end_s, timeline.transfer_end_s))
    if not len(end_s):
        return ()
    causes = _Causes(timeline, problem)
    steps: list[PathStep] = []
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
    """Depth-first from the last item to one without a cause: (item, reason, wait) each."""
    trail: list[tuple[int, Reason, float]] = [(last, "start", 0.0)]
    untried = [causes.of(last)]
    seen = {last}
    while True:
        item = trail[-1][0]
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
    """Looks up what an op or transfer waited for; sorted arrays are made once."""

    def __init__(self, timeline: Timeline, problem: Problem) -> None:
        self.timeline, self.graph = timeline, problem.graph
        self.is_queued = problem.transfers == "queued"
        self.by_device = _sorted_groups(timeline.op_device, timeline.op_end_s, timeline.num_devices)
        queues = problem.costs.routes
        self.send = queues.send_queue[timeline.transfer_src]
        self.receive = queues.receive_queue[timeline.transfer_dst]
        both = np.concatenate((self.send, self.receive))
        ends = np.tile(timeline.transfer_end_s, 2)
        self.by_queue = _sorted_groups(both, ends, 2 * timeline.num_devices)
        key = timeline.transfer_tensor.astype(np.int64) * timeline.num_devices
        key += timeline.transfer_dst
        self.transfer_order = np.argsort(key, kind="stable")
        self.transfer_key = key[self.transfer_order]

    def of(self, item: int) -> list[_Cause]:
        """What an item waited for last; nothing where it starts with the step."""
        transfer = item - self.graph.num_ops
        if transfer >= 0:
            return self._of_transfer(transfer)
        return self._of_op(item) if self.timeline.op_start_s[item] > 0 else []

    def _of_op(self, op: int) -> list[_Cause]:
        start_s = float(self.timeline.op_start_s[op])
        arrivals, before = self._arrivals(op), self._ops_before(op, start_s)
        data_s = max((end_s for _, end_s in arrivals), default=0.0)
        free_s = max((end_s for _, end_s in before), default=0.0)
        last_s = max(data_s, free_s)
        by_data = [
            _Cause(item, "data", max(start_s - free_s, 0.0))
            for item, end_s in arrivals
            if end_s == last_s
        ]
        by_device = [
            _Cause(item, "device", max(start_s - data_s, 0.0))
            for item, end_s in before
            if end_s == last_s
        ]
        return by_data + by_device

    def _of_transfer(self, transfer: int) -> list[_Cause]:
        timeline, num_ops = self.timeline, self.graph.num_ops
        start_s = float(timeline.transfer_start_s[transfer])
        wait_s = start_s - float(timeline.transfer_ready_s[transfer])
        if wait_s > 0 and self.is_queued:
            ahead = _ending_last(self.by_queue, int(self.send[transfer]), start_s)
            ahead += _ending_last(self.by_queue, int(self.receive[transfer]), start_s)
            num_transfers = len(timeline.transfer_tensor)
            return [
                _Cause(num_ops + position % num_transfers, "link", wait_s)
                for position, end_s in ahead
                if end_s == start_s
            ]
        producer = int(self.graph.tensor_producer[timeline.transfer_tensor[transfer]])
        return [_Cause(producer, "link" if wait_s > 0 else "data", wait_s)] if producer >= 0 else []

    def _arrivals(self, op: int) -> list[tuple[int, float]]:
        """What brought each tensor that an op reads, and when."""
        timeline, graph = self.timeline, self.graph
        found: list[tuple[int, float]] = []
        device = int(timeline.op_device[op])
        for tensor in graph.reads_of(op).tolist():
            producer = int(graph.tensor_producer[tensor])
            key = tensor * timeline.num_devices + device
            at = int(np.searchsorted(self.transfer_key, key))
            if at < len(self.transfer_key) and self.transfer_key[at] == key:
                transfer = int(self.transfer_order[at])
                found.append((graph.num_ops + transfer, float(timeline.transfer_end_s[transfer])))
            elif producer >= 0:
                found.append((producer, float(timeline.op_end_s[producer])))
        return found

    def _ops_before(self, op: int, start_s: float) -> list[tuple[int, float]]:
        """Ops that ended on the device last before; one that has a length is enough."""
        device = int(self.timeline.op_device[op])
        ended = [o for o in _ending_last(self.by_device, device, start_s) if o[0] != op]
        if not ended:
            return _ending_last(self.by_device, device, float(np.nextafter(start_s, -np.inf)))
        start = self.timeline.op_start_s
        return next(([(other, end_s)] for other, end_s in ended if start[other] < end_s), ended)


def _sorted_groups(
    group: IntArray, end_s: FloatArray, num_groups: int
) -> tuple[IntArray, FloatArray, IntArray]:
    """Positions by (group, end), their ends, and where each group begins."""
    order = np.lexsort((end_s, group)).astype(np.int32)
    begin = np.searchsorted(group[order], np.arange(num_groups + 1)).astype(np.int32)
    return order, end_s[order], begin


def _ending_last(
    groups: tuple[IntArray, FloatArray, IntArray], group: int, time_s: float
) -> list[tuple[int, float]]:
    """Positions of a group with the latest end that is not after ``time_s``, and that end."""
    order, end_s, begin = groups
    part = slice(int(begin[group]), int(begin[group + 1]))
    ends = end_s[part]
    stop = int(np.searchsorted(ends, time_s, side="right"))
    if stop == 0:
        return []
    first = int(np.searchsorted(ends, ends[stop - 1], side="left"))
    return [(int(position), float(ends[stop - 1])) for position in order[part][first:stop]]
