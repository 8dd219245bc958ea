"""How the benchmarks of waves time a step, take turns on one GPU, and write what they found.

Several processes prepare their systems at the same time: captures, compilations and comparisons of
losses, which nobody times. When all are ready, one after the other has the GPU: for the times of
single ops, and for each row. Meanwhile the others wait: plans, systems and losses of those who are
late are made between two turns (`beside`), because rows of short kernels wait for the host, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

GIB = 2**30
_WARM, _NUM_ROWS = 6, 5
"""Steps until passes and update are captured, and rows that are timed."""
_ROW_S = 0.15
"""What a row of steps takes, if no number of steps is asked for."""
TURN_S, LOSSES_S = 40, 90
"""Who has the GPU for longer, or takes longer for the losses of a system, is taken to hang."""
READY, GO = "ready", "go"


class Row(NamedTuple):
    """What a system did."""

    samples_per_s: float
    spread: float
    """The slowest of five rows of steps over the quickest."""
    busy: float
    """Share of the time in which kernels ran; 0 on a processor."""
    num_kernels: int
    """Of one step; 0 on a processor."""
    peak_bytes: int
    reserved_bytes: int
    scratch_bytes: int
    """Of the peak: what cuBLAS keeps for itself."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End this process where what is inside does not end: others are waiting for the GPU."""
    if torch.cuda.is_available():
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Turns:
    """One process at a time on the GPU, and nothing begun after a limit of time."""

    def __init__(self, folder: str, until_s: float) -> None:
        self._folder = Path(folder) if folder else None
        self._until_s = until_s

    @property
    def left_s(self) -> float:
        """Seconds in which something may begin."""
        return self._until_s - time.time()

    def prepared(self) -> None:
        """All is made that can be made beforehand: wait until it is so everywhere."""
        if self._folder is None:
            return
        if torch.cuda.is_available():
            # The first profile of a process takes seconds, and every row is to come after one.
            kernels_of(lambda: torch.ones(1, device="cuda"), torch.device("cuda"))
        (self._folder / f"{READY}-{os.getpid()}").touch()
        while not (self._folder / GO).exists():
            time.sleep(0.05)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody else runs anything on the GPU meanwhile."""
        with self._gpu(fcntl.LOCK_EX), at_most(TURN_S):
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Others that time nothing may run something, too, but nobody has a turn."""
        with self._gpu(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _gpu(self, how: int) -> Iterator[None]:
        if self._folder is None:
            yield
            return
        with (self._folder / "gpu").open("a") as file:
            fcntl.flock(file, how)
            yield

    def write(self, workload: str, system: str, **found: Any) -> None:
        """A row, for people and for the table of all."""
        told = " | ".join(
            f"{key} {value:,.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in found.items()
        )
        print(f"| {workload} | {system} | {told} |", flush=True)
        if self._folder is not None:
            with (self._folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps({"workload": workload, "system": system, **found}) + "\n")


def options_of(text: str) -> argparse.ArgumentParser:
    """The options of every script of a workload."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--toy", action="store_true", help="on a processor, small")
    parser.add_argument("--cap", type=float, default=8.0, help="GiB")
    parser.add_argument("--only", default="", help="a part of the workload's name")
    parser.add_argument("--systems", default="", help="parts of their names, by ;")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as take a moment")
    parser.add_argument("--turns", default="", help="folder of who has the GPU")
    parser.add_argument("--until", type=float, default=math.inf, help="begin nothing after (epoch)")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was typed; ends here where a GPU is needed that is not there."""
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.toy and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --toy")
    return options


def keep_cap(options: argparse.Namespace) -> None:
    """This process gets no more of the GPU's memory."""
    if options.toy:
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)


def row_of(
    turns: Turns, workload: str, system: str, make: Callable[[], Callable[[], Any]], samples: int,
    device: torch.device, steps: int, planned: tuple[float, int] | None = None,
    told: Callable[[], str] = str,
) -> None:  # fmt: skip
    """Make a system and time it; one that fails says why. ``planned``: samples/s and bytes."""
    if turns.left_s < 0:
        turns.write(workload, system, failed="no time left")
        return
    try:
        with turns.beside():
            start_counting(device)
            step = make()
        with turns.turn():
            row = timed(step, samples, device, steps)
    # One system that cannot run must not hide the others.
    except Exception as error:
        traceback.print_exc()
        turns.write(workload, system, failed=f"{type(error).__name__}: {str(error)[:300]}")
        return
    found: dict[str, Any] = {
        "samples_per_s": row.samples_per_s, "spread": row.spread, "busy": row.busy,
        "kernels": row.num_kernels,
        "peak_gib": (row.peak_bytes - row.scratch_bytes) / GIB,
        "reserved_gib": row.reserved_bytes / GIB, "cublas_gib": row.scratch_bytes / GIB,
    }  # fmt: skip
    if planned is not None:
        found |= {"predicted": planned[0], "planned_gib": planned[1] / GIB}
    if text := told():
        found["told"] = text
    turns.write(workload, system, **found)


def timed(step: Callable[[], Any], samples: int, device: torch.device, steps: int) -> Row:
    """Steps of a system in five rows without a wait inside: the median row."""
    for _ in range(_WARM):
        step()
    settle(device)
    start = time.perf_counter()
    step()
    settle(device)
    once_s = time.perf_counter() - start
    count = max(1, steps // _NUM_ROWS if steps else min(100, round(_ROW_S / once_s)))
    seconds = []
    for _ in range(_NUM_ROWS):
        start = time.perf_counter()
        for _ in range(count):
            step()
        settle(device)
        seconds.append((time.perf_counter() - start) / count)
    is_cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if is_cuda else 0
    reserved = torch.cuda.max_memory_reserved() if is_cuda else 0
    return Row(
        samples / statistics.median(seconds), max(seconds) / min(seconds),
        *kernels_of(step, device), peak, reserved, scratch_bytes() if is_cuda else 0,
    )  # fmt: skip


def scratch_bytes() -> int:
    """What cuBLAS keeps on this device."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def kernels_of(step: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """The share of a step in which at least one kernel runs, and how many it has."""
    if device.type != "cuda":
        return 0.0, 0
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
    return covered / took_us, len(spans)


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
