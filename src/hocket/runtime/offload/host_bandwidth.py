"""Measures the host's bandwidth for copies and updates that run concurrently in a step.

Copies to a GPU, copies from it and host updates share the host's memory bandwidth. Each one is
slower while the others run, by a factor that differs between machines: copies to an H200 fell from
49.5 to 42.5 GB/s, updates from 112 to 73 GB/s. The slowest of the three decides how blocks are best
split between host and device. All three are therefore measured at once, on more memory than caches
hold. In a step none of them runs all the time, so copies and updates are also measured separately.
The rating is a fraction of the mean of both measurements (`_UPDATE_MARGIN`, `_COPY_MARGIN`): on
H200 hosts that updated at 59 GB/s during uninterrupted copies, steps reached 77 and 87 GB/s.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from hocket.base.errors import RunError
from hocket.hardware.cluster import Cluster
from hocket.hardware.detect import available_bytes
from hocket.hardware.host_route import HostRoute, host_route, with_host_route
from hocket.runtime.offload.copy_streams import CopyEvent, CopyStreams, host_buffer
from hocket.runtime.offload.host_adam import fused_adam_step
from hocket.runtime.offload.host_optimizer import threads_for_updates

_COPY_BYTES = 2**26
_QUEUE_LENGTH = 64
"""Copies queued in each direction, so that the queues do not run empty during an update."""
_NUM_BUFFERS = 8
"""Host buffers that copies cycle through, because a single one would stay in caches."""
_NUM_ELEMENTS = 2**25
"""Elements of each updated parameter."""
_NUM_PARAMETERS = 8
_NUM_PASSES, _MAX_MEASURED_S = 6, 1.0
"""Passes over all parameters after a warm-up, and the time after which no further pass begins."""
_BYTES_HELD, _BYTES_READ_WRITTEN = 16, 28
"""Bytes per element: allocated, and read or written by an update."""
_UPDATE_MARGIN = 0.85
"""Fraction of the mean bandwidth at which updates are rated.

With too high a rating a step waits for the host; with too low a rating it only copies more.
Simulated for 4.2 B parameters within 8 GiB (``benchmarks/memory/host_ratings.py``): a step planned
for 85 GB/s takes 18 % longer than the best plan if the host reaches 60, and a step planned for 65
takes 6 % longer if the host reaches 90.
"""
_COPY_MARGIN = 0.95
"""Fraction of the mean bandwidth at which copies are rated; copies vary less between steps."""
_COPIES_ALONE_S = 0.3
_FREE_MEMORY_DIVISOR = 4
"""The measurement uses at most the host's free memory divided by this number."""


class HostBandwidth(NamedTuple):
    """Bandwidth of a host during a step, in bytes per second."""

    in_bps: float
    out_bps: float
    update_bps: float


def with_measured_host(cluster: Cluster, device: torch.device) -> Cluster:
    """Return this machine's cluster with the measured bandwidth of its host.

    Without a GPU, or without enough memory to measure, the cluster is returned unchanged.
    """
    if device.type != "cuda":
        return cluster
    try:
        first, rates = cluster.devices[0], measure_host_bandwidth(device)
    except (RunError, torch.OutOfMemoryError):
        return cluster
    latency_s = host_route(cluster, first).latency_s
    route = HostRoute(out_bps=rates.out_bps, in_bps=rates.in_bps, latency_s=latency_s)
    return replace(with_host_route(cluster, first, route), host_update_bps=rates.update_bps)


@functools.cache
def measure_host_bandwidth(device: torch.device) -> HostBandwidth:
    """Measure the host's bandwidth, rounded to two digits, once per process.

    Further digits are noise, and would give two runs of one problem different plans.
    """
    count = min(
        _NUM_PARAMETERS, available_bytes() // (_FREE_MEMORY_DIVISOR * _BYTES_HELD * _NUM_ELEMENTS)
    )
    with threads_for_updates():
        updates = [_update_of(_NUM_ELEMENTS) for _ in range(max(1, count))]
        copies = _Copies(device)
        # Warm-up: fills the copy queues before anything is measured.
        _rounds(updates, copies.fill, num_passes=1)
        mark = copies.count()
        concurrent_bps = _rounds(updates, copies.fill, _NUM_PASSES)
        concurrent, mark = copies.rates_since(mark), copies.count()
        copies.go_on()
        alone = copies.rates_since(mark)
        copies.wait()
        alone_bps = _rounds(updates, lambda: None, _NUM_PASSES)
    update_bps = _UPDATE_MARGIN * (concurrent_bps + alone_bps) / 2
    in_bps, out_bps = (
        _COPY_MARGIN * (one + other) / 2 for one, other in zip(concurrent, alone, strict=True)
    )
    return HostBandwidth(*(_two_digits(bps) for bps in (in_bps, out_bps, update_bps)))


def _rounds(
    updates: Sequence[Callable[[], object]], before: Callable[[], None], num_passes: int
) -> float:
    """Run updates in rounds; return the bandwidth of the slower half of them in bytes per
    second."""
    began_s, taken_s = time.perf_counter(), list[float]()
    for _ in range(num_passes):
        for update in updates:
            before()
            start_s = time.perf_counter()
            update()
            taken_s.append(time.perf_counter() - start_s)
        if time.perf_counter() - began_s > _MAX_MEASURED_S:
            break
    slower_s = sorted(taken_s)[len(taken_s) // 2 :]
    return _BYTES_READ_WRITTEN * _NUM_ELEMENTS * len(slower_s) / sum(slower_s)


class _Count(NamedTuple):
    """Number of copies that were complete at a time."""

    num_done: tuple[int, int]
    """Copies to the device, and copies from it."""
    at_s: float


class _Copies:
    """Uninterrupted copies in both directions."""

    def __init__(self, device: torch.device) -> None:
        is_real = device.type == "cuda"
        self._streams = CopyStreams(device, is_real=is_real)
        self._here = host_buffer(2 * _NUM_BUFFERS * _COPY_BYTES, pinned=is_real).view(2, -1)
        self._there = torch.empty((2, _COPY_BYTES), dtype=torch.uint8, device=device)
        self._events: tuple[list[CopyEvent], list[CopyEvent]] = ([], [])

    def fill(self) -> None:
        """Fill the queues of both directions."""
        coming, leaving = self._events
        for events, copy in ((coming, self._fetch), (leaving, self._send)):
            while sum(not event.is_done for event in events[-_QUEUE_LENGTH:]) < _QUEUE_LENGTH:
                index = len(events) % _NUM_BUFFERS
                events.append(copy(slice(index * _COPY_BYTES, (index + 1) * _COPY_BYTES)))
                # Without a GPU copies complete at once, and the queue would never fill.
                if events[-1].is_done:
                    break

    def go_on(self) -> None:
        """Continue copying for `_COPIES_ALONE_S`, without updates."""
        until_s = time.perf_counter() + _COPIES_ALONE_S
        while time.perf_counter() < until_s:
            self.fill()
            time.sleep(_COPIES_ALONE_S / 100)

    def count(self) -> _Count:
        """Count completed copies."""
        coming, leaving = (sum(each.is_done for each in events) for events in self._events)
        return _Count((coming, leaving), time.perf_counter())

    def rates_since(self, before: _Count) -> list[float]:
        """Return the bytes per second to the device, and from it, since ``before``."""
        now = self.count()
        return [
            max(1, last - first) * _COPY_BYTES / (now.at_s - before.at_s)
            for last, first in zip(now.num_done, before.num_done, strict=True)
        ]

    def _fetch(self, part: slice) -> CopyEvent:
        return self._streams.fetch([(self._there[0], self._here[0, part])])

    def _send(self, part: slice) -> CopyEvent:
        return self._streams.offload([(self._here[1, part], self._there[1])])

    def wait(self) -> None:
        """Wait for all copies."""
        for events in self._events:
            events[-1].synchronize()


def _two_digits(number: float) -> float:
    return float(f"{number:.2g}")


def _update_of(num_elements: int) -> Callable[[], object]:
    """Return a function that runs one AdamW step in the way host-resident parameters are
    updated."""
    parameter = nn.Parameter(torch.zeros(num_elements))
    parameter.grad = torch.ones(num_elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    gradient = torch.ones(num_elements, dtype=torch.bfloat16)
    one_pass = functools.partial(
        fused_adam_step, optimizer.param_groups[0], optimizer.state[parameter], parameter, gradient,
        torch.empty_like(gradient),
    )  # fmt: skip
    if not one_pass():
        return optimizer.step
    parameter.grad = None
    return one_pass
