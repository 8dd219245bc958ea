"""Time one call on a device: the median of repeated samples of several calls each.

CPU calls are timed by a host clock. On CUDA a sleeping kernel first keeps the stream busy while the
host enqueues the calls, so that the events around them measure device time alone, launches back to
back. If a busy host takes longer than the sleep, the sample shows it and is repeated with a longer
sleep. O(samples · calls).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

NUM_SAMPLES = 5
NUM_HOST_SAMPLES = 15
"""Calls whose median is the host time."""
SAMPLE_S = 2e-3
"""Target length of a sample; it contains at least one call."""
MAX_CALLS = 32
"""Most calls per sample, which bounds the work that the host enqueues during the sleep."""
ENQUEUE_S = 40e-6
"""Generous time for the host to enqueue one call."""
LONGEST_SLEEP = 16
"""Longest sleep as a multiple of the first one.

Then a sample counts even if the device waited for the host: a call that itself synchronizes can
never be enqueued ahead.
"""
SLEEP_CYCLES_PER_S = 2e9
"""Clock of the sleeping kernel; a slower device only sleeps longer."""

Call = Callable[[], Any]


def call_s(calls: Sequence[Call], device: torch.device, limit_s: float = 60.0) -> float:
    """Median seconds of one call; ``calls`` do the same on different data and are used in rotation.

    Several calls with their own data keep inputs out of the caches. A call so slow that all samples
    would exceed ``limit_s`` is timed once, on a CPU even its first run; on CUDA the first run may
    spend seconds on loading kernels and never counts.
    """
    sample = _cuda_sample_s if device.type == "cuda" else _cpu_sample_s
    # The first call loads kernels and picks algorithms; the second shows how many fit a sample.
    first_s = sample(calls[:1], 1)
    if device.type != "cuda" and 2 * first_s > limit_s:
        return first_s
    once_s = sample(calls, 1)
    if once_s * NUM_SAMPLES > limit_s:
        return once_s
    num_calls = max(1, min(MAX_CALLS, int(SAMPLE_S / max(once_s, 1e-7))))
    return statistics.median(sample(calls, num_calls) for _ in range(NUM_SAMPLES))


def host_clock() -> Callable[[], float]:
    """Clock for work on the host.

    With one thread it is that thread's CPU time, which other programs do not lengthen; with several
    it is wall time.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _cpu_sample_s(calls: Sequence[Call], num_calls: int) -> float:
    turns = [calls[index % len(calls)] for index in range(num_calls)]
    clock = host_clock()
    start = clock()
    for call in turns:
        call()
    return (clock() - start) / num_calls


def _cuda_sample_s(calls: Sequence[Call], num_calls: int) -> float:
    turns = [calls[index % len(calls)] for index in range(num_calls)]

    def launch() -> None:
        for call in turns:
            call()

    return launched_ahead_s(launch, (num_calls + 5) * ENQUEUE_S) / num_calls


def launched_ahead_s(launch: Call, sleep_s: float) -> float:
    """Device seconds of work launched on the current CUDA stream while the device sleeps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    is_ahead, longest_s = False, LONGEST_SLEEP * sleep_s
    # If the end was reached before everything was launched, the host was too slow: sleep longer.
    while not is_ahead and sleep_s <= longest_s:
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep_s * SLEEP_CYCLES_PER_S))  # type: ignore[no-untyped-call]
        start.record()
        launch()
        end.record()
        is_ahead = not start.query()  # type: ignore[no-untyped-call]
        end.synchronize()
        sleep_s *= 4
    return float(start.elapsed_time(end)) * 1e-3


def wall_s(call: Call, device: torch.device) -> float:
    """Median host seconds of one call, without waiting for the device to finish."""
    samples = []
    clock = time.perf_counter if device.type == "cuda" else host_clock()
    for _ in range(NUM_HOST_SAMPLES):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        call()
        samples.append(clock() - start)
    return statistics.median(samples)
