"""A CUDA graph made of others, times of one, and what a profiled replay tells of every kernel.

When each kernel ran, and the threads, registers and shared memory of its blocks, is in the trace of
the profiler (`events_of`). These are plain lists, for JSON.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hocket.capture.driver import call_driver

_DEVICE_EVENTS = "kernel", "gpu_memcpy", "gpu_memset"
_STATIC = ("grid", "block", "registers per thread", "shared memory", "blocks per SM",
           "warps per SM", "est. achieved occupancy %", "bytes")  # fmt: skip
"""What a trace says of every run of a kernel alike."""
_NUM_ROWS, _FEWEST, _MOST = 3, 7, 40
"""Rows of launches that are timed, and how many each has."""
_ROW_S = 0.06
_NUM_AHEAD, _SLEEP_CYCLES = 5, 60_000_000
"""Launches that the host asks for while the device sleeps, about 30 ms."""


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────


class Beside:
    """Graphs as the rows of one: nothing of one waits for anything of another."""

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        self._kept = graphs
        whole, self._made = ctypes.c_void_p(), ctypes.c_void_p()
        call_driver("cuGraphCreate", ctypes.byref(whole), ctypes.c_uint(0))
        for graph in graphs:
            node = ctypes.c_void_p()
            call_driver(
                "cuGraphAddChildGraphNode", ctypes.byref(node), whole, None, ctypes.c_size_t(0),
                ctypes.c_void_p(graph.raw_cuda_graph()),
            )  # fmt: skip
        call_driver(
            "cuGraphInstantiateWithFlags", ctypes.byref(self._made), whole, ctypes.c_ulonglong(0)
        )

    def replay(self) -> None:
        """Launch all on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        call_driver("cuGraphLaunch", self._made, ctypes.c_void_p(stream))


# ── times ────────────────────────────────────────────────────────────────────────────────────────


class Times(NamedTuple):
    """Of one launch, in µs."""

    back_to_back: list[float]
    ahead: list[float]
    """The same, when the host has asked for all before the first one begins."""
    host: float
    """Until the host is free again, with a device that has nothing to do."""


def times_of(launch: Callable[[], Any]) -> Times:
    """Rows of launches without a wait inside."""
    once_us = [_row_us(launch, 1, sleeps=False) for _ in range(3)][-1]
    count = max(_FEWEST, min(_MOST, round(1e6 * _ROW_S / once_us)))
    rows = [_row_us(launch, count, sleeps=False) for _ in range(_NUM_ROWS)]
    ahead = [_row_us(launch, _NUM_AHEAD, sleeps=True) for _ in range(_NUM_ROWS)]
    hosts = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        hosts.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return Times(rows, ahead, statistics.median(hosts))


def _row_us(launch: Callable[[], Any], count: int, *, sleeps: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if sleeps:
        torch.cuda._sleep(_SLEEP_CYCLES)
    start.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / count


# ── traces ───────────────────────────────────────────────────────────────────────────────────────


class Table:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._number: dict[str, int] = {}

    def number(self, value: Any) -> int:
        """That of a value, which is kept."""
        key = json.dumps(value)
        if key not in self._number:
            self._number[key] = len(self.values)
            self.values.append(value)
        return self._number[key]


def events_of(trace: dict[str, Any], kernels: Table) -> list[list[Any]]:
    """What ran on the device: kernel, start and length in ns, stream; by start."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_EVENTS:
            told = event.get("args", {})
            kernel = kernels.number([event["name"], *(told.get(key) for key in _STATIC)])
            found.append((kernel, event["ts"], event["dur"], told.get("stream")))
    found.sort(key=lambda row: row[1])
    first = found[0][1] if found else 0.0
    return [
        [kernel, round(1e3 * (start - first)), round(1e3 * took), stream]
        for kernel, start, took, stream in found
    ]


def profiled(launch: Callable[[], Any], times: int, kernels: Table) -> list[list[list[Any]]]:
    """Events of each of some launches, one after the other; all in one list if they differ."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            launch()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = events_of(json.loads(path.read_text()), kernels)
    if len(events) % times:
        return [events]
    size = len(events) // times
    return [events[at : at + size] for at in range(0, len(events), size)]


class Spans(NamedTuple):
    """What the events of one launch come to, in µs."""

    kernels: int
    span_us: float
    sum_us: float
    """Of all kernels, one by one."""
    idle_us: float
    """No kernel runs."""
    both_us: float
    """Two or more run."""

    def gap_us(self, rows: int) -> float:
        """Between kernels of a row, where so many rows are there from beginning to end."""
        return (rows * self.span_us - self.sum_us) / max(1, self.kernels)


def spans_of(events: Sequence[Sequence[Any]]) -> Spans:
    """Sums over the events of one launch, which are sorted by start."""
    edges = sorted((at, step) for _, start, took, *_ in events
                   for at, step in ((start, 1), (start + took, -1)))  # fmt: skip
    idle = both = running = 0
    for (at, step), (later, _) in pairwise(edges):
        running += step
        idle += (later - at) * (running == 0)
        both += (later - at) * (running > 1)
    total = sum(event[2] for event in events)
    span = edges[-1][0] - edges[0][0] if edges else 0
    return Spans(len(events), span / 1e3, total / 1e3, idle / 1e3, both / 1e3)
