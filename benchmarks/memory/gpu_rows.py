"""Rows of a run on a GPU: seconds per step, peak and losses of one system on one model, or why not.

Rows are written as they come (``rows.jsonl``), so that a run that is cut off leaves what it has;
processes of one run write to the same file, and take turns where they time something.
"""

from __future__ import annotations

import fcntl
import gc
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_models import DEVICE
from torch import nn

GIB = 2**30
TRACE_LINES = 15
"""Of what led to an error, kept in its row."""


class Book:
    """Rows as they come, and the seconds that are left."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.began, self.seconds = folder, time.perf_counter(), seconds
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.began)

    def add(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """Note a row."""
        row = {"row": name, **row, "at_s": round(time.perf_counter() - self.began, 1)}
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return row

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process of the run has the GPU meanwhile."""
        with (self.folder / "gpu.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def clear() -> None:
    """Nothing of a row is left for the next."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def cap_to(cap: int | None) -> None:
    """Limit PyTorch's allocator."""
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else cap / total)


def measured(
    make: Callable[..., Any],
    build: Callable[[], nn.Module],
    batch: Any,
    *,
    micro: int = 1,
    cap: int | None = None,
    warm: int = 2,
    steps: int = 3,
    explain: bool = False,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """One system on one model; ``steps`` are timed after ``warm`` others, without any the last one.

    With ``explain`` another step says what its time goes into. Steps are made ``alone``.
    """
    row: dict[str, Any] = {"micro_batches": micro, "cap_gib": None if cap is None else cap / GIB}
    clear()
    began = time.perf_counter()
    try:
        model = build()
        row["params"] = sum(p.numel() for p in model.parameters())
        clear()
        cap_to(cap)
        step = make(model, batch, micro)
        row["ready_s"] = time.perf_counter() - began
        with alone():
            row |= timed_steps(step, batch, warm, steps)
            if explain:
                row["where"] = spent(lambda: step(batch))
    # A system that fails must not lose the rest: the machine is lent for minutes.
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
        row["trace"] = traceback.format_exc().splitlines()[-TRACE_LINES:]
    row |= peaks()
    model = step = None
    cap_to(None)
    clear()
    return row


def timed_steps(step: Callable[[Any], Any], batch: Any, warm: int, steps: int) -> dict[str, Any]:
    """Losses and seconds of steps, and the median of those after the first ones, which follow each
    other as in a training: nothing but the loss is waited for in between."""
    losses, times = [], []
    for _ in range(warm):
        synchronize()
        start = time.perf_counter()
        losses.append(float(step(batch)))
        synchronize()
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(float(step(batch)))
        now = time.perf_counter()
        times.append(now - start)
        start = now
    synchronize()
    step_s = sorted(times[warm:])[steps // 2] if steps else times[-1]
    found = {"losses": losses, "times": times, "step_s": step_s}
    if steps:
        found["mean_step_s"] = (sum(times[warm:]) + time.perf_counter() - start) / steps
    return found


class Laps(dict[str, float]):
    """Seconds of what was done one after the other, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """What was done since the last one."""
        now = time.perf_counter()
        self[name], self._began = round(now - self._began, 2), now


class LockClock:
    """Seconds in which memory of the host is made and locked in place for copies."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> LockClock:
        from hocket.runtime.offload import copy_streams as copies
        from hocket.runtime.offload import state_swap as visiting

        self._inner = copies.host_buffer

        def clocked(num_bytes: int, *, pinned: bool) -> torch.Tensor:
            start = time.perf_counter()
            made = self._inner(num_bytes, pinned=pinned)
            self.seconds += time.perf_counter() - start
            return made

        self._users: list[Any] = [copies, visiting]
        for user in self._users:
            user.host_buffer = clocked
        return self

    def __exit__(self, *_: object) -> None:
        for user in self._users:
            user.host_buffer = self._inner


class HostClock:
    """Seconds that updates of blocks at home on the host take, and numbers that they change."""

    def __init__(self) -> None:
        self.seconds, self.numbers = 0.0, 0

    def __enter__(self) -> HostClock:
        from hocket.runtime.offload import host_optimizer as home_step

        self._inner = home_step._step

        def clocked(block: Any, part: Any, chosen: slice) -> None:
            start = time.perf_counter()
            self._inner(block, part, chosen)
            self.seconds += time.perf_counter() - start
            self.numbers += sum(p.parameter.numel() for p in block.home_layout.places[chosen])

        home_step._step = clocked
        return self

    def __exit__(self, *_: object) -> None:
        from hocket.runtime.offload import host_optimizer as home_step

        home_step._step = self._inner

    def told(self, steps: int) -> dict[str, float]:
        """Of a step, by so many: seconds, and GB/s at 28 bytes a number."""
        rate = 28 * self.numbers / self.seconds / 1e9 if self.seconds else 0.0
        return {"updates_s": self.seconds / steps, "updates_gbps": rate}


def peaks() -> dict[str, float]:
    """What PyTorch's allocator has given and taken at most."""
    if DEVICE != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def spent(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a step in which kernels run and in which copies each way do."""
    with torch.profiler.profile() as profile:
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        found = {"step_s": time.perf_counter() - start}
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "to_device_s" if "HtoD" in event.name else "to_host_s"
            kind = kind if "Memcpy" in event.name and "DtoD" not in event.name else "kernels_s"
            spans.setdefault(kind, []).append((event.time_range.start, event.time_range.end))
    return found | {kind: _union_s(each) for kind, each in spans.items()}


def _union_s(spans: list[tuple[float, float]]) -> float:
    """Seconds that spans of microseconds cover together."""
    total = end = 0.0
    for begin, finish in sorted(spans):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total / 1e6


def copy_rates(size: int) -> dict[str, float]:
    """GB/s of pinned copies."""
    from hocket.runtime.offload.copy_streams import host_buffer

    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    here = host_buffer(size, pinned=DEVICE == "cuda")
    found = {}
    for name, target, source in (("h2d_gbps", there, here), ("d2h_gbps", here, there)):
        target.copy_(source, non_blocking=True)
        synchronize()
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        synchronize()
        found[name] = 8 * size / (time.perf_counter() - began) / 1e9
    return found


def update_rates(num_elements: int, size: int) -> dict[str, float]:
    """GB/s of AdamW on the host at 28 bytes an element, by threads: alone, beside copies both ways,
    and beside a thread of Python that keeps a core busy as the one does that starts the work."""
    from hocket.hardware.detect import measure_update_bps
    from hocket.runtime.offload.copy_streams import host_buffer

    parameter = nn.Parameter(torch.zeros(num_elements))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(num_elements)
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    here = [host_buffer(size, pinned=DEVICE == "cuda") for _ in range(2)]
    stop = threading.Event()

    def copies() -> None:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()] if DEVICE == "cuda" else []
        while streams and not stop.is_set():
            for stream, pair in zip(streams, ((there, here[0]), (here[1], there)), strict=True):
                with torch.cuda.stream(stream):
                    pair[0].copy_(pair[1], non_blocking=True)
            for stream in streams:
                stream.synchronize()

    def spins() -> None:
        while not stop.is_set():
            sum(range(1000))

    def rate() -> float:
        optimizer.step()
        began = time.perf_counter()
        for _ in range(4):
            optimizer.step()
        return 4 * 28 * num_elements / (time.perf_counter() - began) / 1e9

    found = {"detected_gbps": measure_update_bps() / 1e9}
    all_threads = torch.get_num_threads()
    for count in dict.fromkeys(max(1, all_threads - less) for less in (0, 1, 2, 4)):
        torch.set_num_threads(count)
        found[f"adamw_{count}_threads_gbps"] = rate()
        for name, beside in (("copies", copies), ("python", spins)):
            stop.clear()
            thread = threading.Thread(target=beside)
            thread.start()
            found[f"adamw_{count}_threads_beside_{name}_gbps"] = rate()
            stop.set()
            thread.join()
    torch.set_num_threads(all_threads)
    return found


def product_rate() -> float:
    """TFLOP/s of bfloat16 matrix products."""
    left, right = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    left @ right
    synchronize()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12
