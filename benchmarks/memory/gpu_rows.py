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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_models import DEVICE
from torch import nn

GIB = 2**30


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
    row |= peaks()
    model = step = None
    cap_to(None)
    clear()
    return row


def timed_steps(step: Callable[[Any], Any], batch: Any, warm: int, steps: int) -> dict[str, Any]:
    """Losses and seconds of steps, and the median of those after the first ones."""
    losses, times = [], []
    for _ in range(warm + steps):
        synchronize()
        start = time.perf_counter()
        losses.append(float(step(batch)))
        synchronize()
        times.append(time.perf_counter() - start)
    step_s = sorted(times[warm:])[steps // 2] if steps else times[-1]
    return {"losses": losses, "times": times, "step_s": step_s}


def peaks() -> dict[str, float]:
    """What PyTorch's allocator has given and taken at most."""
    if DEVICE != "cuda":
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def spent(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a step in which kernels run, of copies each way, and of the host's own ops."""
    with torch.profiler.profile() as profile:
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        found = {"step_s": time.perf_counter() - start}
    spans = []
    for event in profile.events():
        took_s = event.time_range.elapsed_us() / 1e6
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        for part, name in (("HtoD", "to_device_s"), ("DtoH", "to_host_s")):
            if on_device and part in event.name:
                found[name] = found.get(name, 0.0) + took_s
        if on_device and "Memcpy" not in event.name:
            spans.append((event.time_range.start, event.time_range.end))
        if not on_device and event.name in ("aten::_fused_adamw_", "cudaStreamSynchronize"):
            found[event.name] = found.get(event.name, 0.0) + took_s
    end = 0.0
    for begin, finish in sorted(spans):
        found["kernels_s"] = found.get("kernels_s", 0.0) + max(0.0, finish - max(begin, end)) / 1e6
        end = max(end, finish)
    return found


def copy_rates(size: int) -> dict[str, float]:
    """GB/s of pinned copies."""
    from hocket.runtime.memory.copies import host_buffer

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
    from hocket.runtime.memory.copies import host_buffer

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
