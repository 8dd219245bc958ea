"""Measured times of one step, and the Timeline made of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.runtime.device_instructions import Transfer
from hocket.simulate.timeline import Timeline

_TABLES = ("op_start_s", "op_end_s", "sent_s", "posted_s", "arrived_s", "peak_bytes")
"""Fields of a record that are numbers by number."""


@dataclass
class StepRecord:
    """Times of one step in seconds of one clock, from all devices or from one."""

    start_s: float = 0.0
    end_s: float = 0.0
    op_start_s: dict[int, float] = field(default_factory=dict)
    op_end_s: dict[int, float] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)
    """By transfer: when the tensor was there and its sending began."""
    posted_s: dict[int, float] = field(default_factory=dict)
    """By transfer: when the other side was ready to take it."""
    arrived_s: dict[int, float] = field(default_factory=dict)
    """By transfer: when it was found to be complete."""
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By device: bytes held from a time on."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    loss: float | None = None

    @property
    def step_s(self) -> float:
        """Length of the step."""
        return self.end_s - self.start_s

    def to_arrays(self) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """The record as plain data and arrays: keys and values of each table."""
        plain = {"start_s": self.start_s, "end_s": self.end_s, "loss": self.loss}
        arrays: list[NDArray[Any]] = []
        for name in _TABLES:
            table = getattr(self, name)
            arrays.append(np.array(list(table), dtype=np.int64))
            arrays.append(np.array(list(table.values()), dtype=np.float64))
        curves = [(d, time_s, size) for d, curve in self.memory.items() for time_s, size in curve]
        arrays.append(np.array(curves, dtype=np.float64))
        return plain, arrays

    @classmethod
    def from_arrays(cls, plain: dict[str, Any], buffers: Sequence[Any]) -> StepRecord:
        """The record of `to_arrays`, its arrays as bytes."""
        record = cls(**plain)
        for index, name in enumerate(_TABLES):
            keys = np.frombuffer(buffers[2 * index], dtype=np.int64).tolist()
            values = np.frombuffer(buffers[2 * index + 1], dtype=np.float64).tolist()
            getattr(record, name).update(zip(keys, values, strict=True))
        record.peak_bytes = {device: int(size) for device, size in record.peak_bytes.items()}
        for device, time_s, size in np.frombuffer(buffers[-1], dtype=np.float64).reshape(-1, 3):
            record.memory.setdefault(int(device), []).append((float(time_s), int(size)))
        return record


def joined(records: Iterable[StepRecord]) -> StepRecord:
    """The record of a step whose devices each kept their own."""
    whole = StepRecord(start_s=np.inf, end_s=-np.inf)
    for record in records:
        whole.start_s = min(whole.start_s, record.start_s)
        whole.end_s = max(whole.end_s, record.end_s)
        for name in (*_TABLES, "memory"):
            getattr(whole, name).update(getattr(record, name))
        whole.loss = record.loss if record.loss is not None else whole.loss
    return whole


class StepParts:
    """Steps of which each rank sends its own record."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._parts: dict[Hashable, list[StepRecord]] = {}

    def add(self, step: Hashable, part: StepRecord) -> StepRecord | None:
        """The record of the whole step, once all ranks have sent theirs."""
        parts = self._parts.setdefault(step, [])
        parts.append(part)
        return joined(self._parts.pop(step)) if len(parts) == self._num_ranks else None


def measured_timeline(
    record: StepRecord, device_of: IntArray, transfers: tuple[Transfer, ...], num_devices: int
) -> Timeline:
    """The step in the form that the simulator uses; time 0 is its start."""
    ops = range(len(device_of))
    start_s = _since([record.op_start_s[op] for op in ops], record.start_s)
    end_s = np.maximum(_since([record.op_end_s[op] for op in ops], record.start_s), start_s)
    numbers = range(len(transfers))
    ready_s = _since([record.sent_s[n] for n in numbers], record.start_s)
    posted_s = _since([record.posted_s[n] for n in numbers], record.start_s)
    begun_s = np.maximum(ready_s, posted_s)
    done_s = np.maximum(_since([record.arrived_s[n] for n in numbers], record.start_s), begun_s)
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


def _since(times_s: list[float], start_s: float) -> FloatArray:
    return np.maximum(np.array(times_s, dtype=np.float64) - start_s, 0.0)


def _curves(record: StepRecord, num_devices: int) -> tuple[LongArray, FloatArray, LongArray]:
    """Memory curves one after another: times ascend, each once, the last value of a time stays."""
    pointers, times, sizes = [0], [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
    for device in range(num_devices):
        points = record.memory.get(device, [])
        begin = points[0][1] if points else 0
        time_s = np.concatenate(([0.0], _since([time for time, _ in points], record.start_s)))
        time_s = np.maximum.accumulate(time_s)
        held = np.array([begin, *(size for _, size in points)], dtype=np.int64)
        is_last = np.append(np.diff(time_s) > 0, True)
        times.append(time_s[is_last])
        sizes.append(held[is_last])
        pointers.append(pointers[-1] + int(np.count_nonzero(is_last)))
    return np.array(pointers, dtype=np.int64), np.concatenate(times), np.concatenate(sizes)
