"""How the benchmarks of waves time a step, and take turns on one GPU.

Several processes prepare their systems at the same time (captures and compilations take a processor
much longer than a GPU), and only one of them has the GPU while it measures.
"""

from __future__ import annotations

import fcntl
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

GIB = 2**30
_WARM = 3


class Row(NamedTuple):
    """What a system did."""

    samples_per_s: float
    spread: float
    """The slowest of five rows of steps over the quickest."""
    busy: float
    """Share of the time in which kernels ran; 0 on a processor."""
    peak_bytes: int
    reserved_bytes: int
    scratch_bytes: int
    """Of the peak: what cuBLAS keeps for itself."""


class Turns:
    """One process at a time on the GPU, and nothing begun after a limit of time."""

    def __init__(self, lock: str, until_s: float) -> None:
        self._lock = Path(lock) if lock else None
        self._until_s = until_s

    @property
    def left_s(self) -> float:
        """Seconds in which something may begin."""
        return self._until_s - time.time()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else measures meanwhile."""
        if self._lock is None:
            yield
            return
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def timed(step: Callable[[], Any], samples: int, device: torch.device, steps: int) -> Row:
    """Steps of a system in five rows without a wait inside: the median row."""
    for _ in range(_WARM):
        step()
    settle(device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(max(1, steps // 5)):
            step()
        settle(device)
        seconds.append((time.perf_counter() - start) / max(1, steps // 5))
    is_cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if is_cuda else 0
    reserved = torch.cuda.max_memory_reserved() if is_cuda else 0
    return Row(
        samples / statistics.median(seconds), max(seconds) / min(seconds),
        busy_share(step, device), peak, reserved, scratch_bytes() if is_cuda else 0,
    )  # fmt: skip


def scratch_bytes() -> int:
    """What cuBLAS keeps on this device."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def busy_share(step: Callable[[], Any], device: torch.device) -> float:
    """The share of a step in which at least one kernel runs."""
    if device.type != "cuda":
        return 0.0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        step()
        settle(device)
        took_us = (time.perf_counter() - start) * 1e6
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    covered, end = 0.0, 0.0
    for begin, finish in spans:
        covered += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return covered / took_us


def settle(device: torch.device) -> None:
    """Wait for all that was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def start_counting(device: torch.device) -> None:
    """Peaks are those from now on, without what rows before have left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
