"""Measured times of one step, and their conversion into a timeline.

Each rank or device fills a `StepRecord`; `joined` merges them, and `measured_timeline` returns the
same `Timeline` type as the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.runtime.device_instructions import Transfer
from hocket.simulate.timeline import Timeline

TIMES = ("op_start_s", "op_end_s", "sent_s", "posted_s", "arrived_s")
"""Fields of `StepRecord` that hold a time per op or transfer."""


@dataclass
class StepRecord:
    """Times of one step in seconds of one clock, on one device or on all devices."""

    start_s: float = 0.0
    end_s: float = 0.0
    loss: float | None = None
    op_start_s: dict[int, float] = field(default_factory=dict)
    """Start time by op number."""
    op_end_s: dict[int, float] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)
    """Time at which the sender started a transfer."""
    posted_s: dict[int, float] = field(default_factory=dict)
    """Time at which the receiver was ready for a transfer."""
    arrived_s: dict[int, float] = field(default_factory=dict)
    """Time at which the receiver found a transfer complete."""
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """Memory curve of each device: pairs of a time and the bytes held from then on."""
    peak_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Length of the step."""
        return self.end_s - self.start_s

    def to_data(self) -> dict[str, Any]:
        """Return the record as plain data; tables become lists of pairs, which JSON can hold."""
        return {
            name: list(value.items()) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StepRecord:
        """Return the record of `to_data`."""
        tables: dict[str, Any] = {
            name: dict(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**tables)


def joined(records: Iterable[StepRecord]) -> StepRecord:
    """Merge the records of several devices for one step."""
    whole = StepRecord(start_s=np.inf, end_s=-np.inf)
    for record in records:
        whole.start_s = min(whole.start_s, record.start_s)
        whole.end_s = max(whole.end_s, record.end_s)
        whole.loss = record.loss if record.loss is not None else whole.loss
        for name, table in vars(record).items():
            if isinstance(table, dict):
                getattr(whole, name).update(table)
    return whole


def measured_timeline(
    record: StepRecord, device_of: IntArray, transfers: tuple[Transfer, ...], num_devices: int
) -> Timeline:
    """Return the record as a timeline in the simulator's format; time 0 is the step's start."""

    def since(table: dict[int, float], count: int) -> FloatArray:
        times_s = np.array([table[number] for number in range(count)], dtype=np.float64)
        return np.maximum(times_s - record.start_s, 0.0)

    start_s = since(record.op_start_s, len(device_of))
    end_s = np.maximum(since(record.op_end_s, len(device_of)), start_s)
    ready_s = since(record.sent_s, len(transfers))
    # A transfer begins once both sides are ready.
    begun_s = np.maximum(ready_s, since(record.posted_s, len(transfers)))
    done_s = np.maximum(since(record.arrived_s, len(transfers)), begun_s)
    columns = np.array(transfers, dtype=np.int32).reshape(-1, 3)
    order = np.lexsort((columns[:, 2], columns[:, 0], begun_s))
    memory_ptr, memory_time_s, memory_bytes = _curves(record, num_devices)
    return Timeline(
        makespan_s=max(record.step_s, end_s.max(initial=0.0), done_s.max(initial=0.0)),
        op_device=device_of,
        op_stream=np.zeros(len(device_of), dtype=np.int8),
        op_start_s=start_s,
        op_end_s=end_s,
        transfer_tensor=columns[order, 0],
        transfer_src=columns[order, 1],
        transfer_dst=columns[order, 2],
        transfer_ready_s=ready_s[order],
        transfer_start_s=begun_s[order],
        transfer_end_s=done_s[order],
        memory_ptr=memory_ptr,
        memory_time_s=memory_time_s,
        memory_bytes=memory_bytes,
        peak_bytes=np.array(
            [record.peak_bytes.get(device, 0) for device in range(num_devices)], dtype=np.int64
        ),
    )


def _curves(record: StepRecord, num_devices: int) -> tuple[LongArray, FloatArray, LongArray]:
    """Return the memory curves one after the other, with ascending times."""
    pointers, times, sizes = [0], [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
    for device in range(num_devices):
        points = np.array(record.memory.get(device) or [(0.0, 0)], dtype=np.float64)
        time_s = np.maximum.accumulate(np.maximum(points[:, 0] - record.start_s, 0.0))
        time_s[0] = 0.0
        # Of several values at the same time the last one holds.
        is_last = np.append(np.diff(time_s) > 0, True)
        times.append(time_s[is_last])
        sizes.append(points[is_last, 1].astype(np.int64))
        pointers.append(pointers[-1] + int(np.count_nonzero(is_last)))
    return np.array(pointers, dtype=np.int64), np.concatenate(times), np.concatenate(sizes)
