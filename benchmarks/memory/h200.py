"""Training GPTs under a cap on one GPU: what fits, how fast, and what was predicted.

    PYTHONPATH=src python benchmarks/memory/h200.py --out DIR [--seconds 450] [--small] [--main]

Weights in float32, bfloat16 autocast, fused AdamW, 16,384 tokens a step in sequences of 1,024, a
vocabulary of 50,304 with tied embeddings. The cap is on PyTorch's allocator
(``set_per_process_memory_fraction``). Systems that do not chunk take the step in 16 micro-batches.
Rows are written as they come (``rows.jsonl``), so that a run that is cut off leaves what it has.
Parts are left out when the seconds are over; with ``--main`` only the large model is trained,
uncapped and by hocket under each cap.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# For all systems: without it the allocator's gaps take up to a tenth of a cap.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from gpt import DEVICE, SEQUENCE, Gpt, adamw, batches, built, forward
from torch import nn

GIB = 2**30
TOKENS = 16384
NUM_STEPS = 3
"""Timed steps after two others."""


# ── the systems ──────────────────────────────────────────────────────────────────────────────


def plain(model: nn.Module, batch: Any, micro: int, context: Any = None) -> Callable[[Any], Any]:
    """Plain PyTorch in ``micro`` parts."""
    optimizer = adamw(model, fused=True)

    def step(batch: Any) -> torch.Tensor:
        total = torch.zeros((), device=DEVICE)
        for part in zip(*(tensor.chunk(micro) for tensor in batch), strict=True):
            with context() if context else torch.enable_grad():
                loss = forward(model, part) / micro
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def checkpointed(model: Gpt, batch: Any, micro: int) -> Callable[[Any], Any]:
    """Full activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return plain(model, batch, micro)


def saved_on_cpu(model: Gpt, batch: Any, micro: int) -> Callable[[Any], Any]:
    """PyTorch's own offloading of activations."""
    return plain(model, batch, micro, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def fsdp_offload(model: Gpt, batch: Any, micro: int) -> Callable[[Any], Any]:
    """FSDP2 on one rank with everything on the host, and activation checkpointing."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = adamw(model, fused=True)

    def step(batch: Any) -> torch.Tensor:
        total = torch.zeros((), device=DEVICE)
        parts = list(zip(*(tensor.chunk(micro) for tensor in batch), strict=True))
        for part in parts:
            loss = model(*part) / micro
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ours(budget: int, notes: dict[str, Any]) -> Callable[..., Any]:
    """``hocket.prepare(memory=)``."""

    def make(model: Gpt, batch: Any, micro: int) -> Callable[[Any], Any]:
        import hocket

        began = time.perf_counter()
        train = hocket.prepare(model, adamw(model), batch, forward=forward, memory=budget)
        kept = train.memory
        notes["prepare_s"] = time.perf_counter() - began
        notes["predicted_peak_gib"] = kept.peak_bytes / GIB
        notes["predicted_step_s"] = kept.step_s
        notes["loss_chunks"] = kept.section.loss_chunks
        counts: dict[str, int] = {}
        for block in kept.section.blocks:
            key = f"{block.activations}/{block.checkpoint}/{block.parameters}/{block.update}"
            counts[key] = counts.get(key, 0) + 1
        notes["blocks"] = counts
        return train.step

    return make


RESERVES = (int(0.3 * GIB), GIB)
"""Of a cap, left to the gaps of the allocator; the second where the first is too little."""


# ── measuring ────────────────────────────────────────────────────────────────────────────────


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
    width: int,
    num_layers: int,
    *,
    home: str,
    micro: int,
    cap: int | None,
    steps: int,
    tokens: int,
) -> dict[str, Any]:
    """One system on one model: seconds per step, peak and losses, or why not."""
    row: dict[str, Any] = {"width": width, "layers": num_layers, "micro_batches": micro}
    row["cap_gib"] = None if cap is None else cap / GIB
    clear()
    data = batches(1, tokens) * (2 + steps)
    began = time.perf_counter()
    try:
        model = built(width, num_layers, home)
        row["params"] = sum(p.numel() for p in model.parameters())
        clear()
        cap_to(cap)
        step = make(model, data[0], micro)
        row["ready_s"] = time.perf_counter() - began
        row["losses"] = []
        times = []
        for batch in data:
            synchronize()
            start = time.perf_counter()
            row["losses"].append(float(step(batch)))
            synchronize()
            times.append(time.perf_counter() - start)
        row["step_s"] = sorted(times[2:])[len(times[2:]) // 2] if steps else times[-1]
        row["times"] = times
    # A system that fails must not lose the rest: the machine is lent for minutes.
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    if DEVICE == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    model = step = None
    cap_to(None)
    clear()
    return row


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def rates() -> dict[str, Any]:
    """What the machine's buses and cores do: GB/s of copies, and of AdamW on the host."""
    from hocket.runtime.memory.copies import host_buffer

    size = 2**28
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    began = time.perf_counter()
    here = host_buffer(size, pinned=DEVICE == "cuda")
    found: dict[str, Any] = {"pin_gbps": size / (time.perf_counter() - began) / 1e9}
    for name, target, source in (("h2d_gbps", there, here), ("d2h_gbps", here, there)):
        target.copy_(source, non_blocking=True)
        synchronize()
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        synchronize()
        found[name] = 8 * size / (time.perf_counter() - began) / 1e9
    parameter = nn.Parameter(torch.zeros(2**26))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(2**26)
    optimizer.step()
    began = time.perf_counter()
    for _ in range(4):
        optimizer.step()
    found["adamw_gbps"] = 4 * 28 * 2**26 / (time.perf_counter() - began) / 1e9
    found["threads"] = torch.get_num_threads()
    if DEVICE == "cuda":
        left, right = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
        left @ right
        synchronize()
        began = time.perf_counter()
        for _ in range(10):
            left @ right
        synchronize()
        found["bf16_tflops"] = 10 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12
    return found


class Book:
    """Rows as they come."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.began, self.seconds = folder, time.perf_counter(), seconds
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.began)

    def add(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """Note a row."""
        row = {"system": name, **row, "at_s": round(time.perf_counter() - self.began, 1)}
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        return row


def largest(
    book: Book, name: str, make: Any, width: int, guesses: range, **how: Any
) -> dict[str, Any] | None:
    """The deepest model of a width that a system trains, by halving."""
    low, high, best = 0, len(guesses), None
    while low < high and book.left_s > 20:
        middle = (low + high) // 2
        row = book.add(name, measured(make, width, guesses[middle], steps=0, **how))
        if "error" in row:
            high = middle
        else:
            low, best = middle + 1, row
    return best


def under_budget(book: Book, cap: int, **how: Any) -> None:
    """hocket with a budget a little below the cap."""
    for reserve in RESERVES:
        notes: dict[str, Any] = {"budget_gib": (cap - reserve) / GIB}
        row = measured(ours(cap - reserve, notes), home="cpu", micro=1, cap=cap, **how)
        if "error" not in book.add("hocket", {**row, **notes}):
            break


def main() -> None:
    """All parts, the most important first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--small", action="store_true", help="a rehearsal with small models")
    parser.add_argument("--main", action="store_true", help="the large model alone")
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=36)
    arguments = parser.parse_args()
    book = Book(arguments.out, arguments.seconds)
    book.add("rates", rates())
    width, layers, tokens, caps = arguments.width, arguments.layers, TOKENS, (8 * GIB, 12 * GIB)
    if arguments.small:
        width, layers, tokens, caps = 512, 6, 4096, (2 * GIB,)
    micro = tokens // SEQUENCE
    same = {"tokens": tokens, "steps": NUM_STEPS}
    whole = {"width": width, "num_layers": layers}
    book.add("uncapped", measured(plain, **whole, home=DEVICE, micro=4, cap=None, **same))
    for cap in caps:
        under_budget(book, cap, **whole, **same)
    if arguments.main:
        return
    shape = {"width": width if arguments.small else 2048, "tokens": tokens, "micro": micro}
    depths = range(1, 6) if arguments.small else range(2, 14)
    systems: dict[str, Any] = {
        "eager": plain, "checkpointing": checkpointed, "save_on_cpu": saved_on_cpu,
    }  # fmt: skip
    for cap in caps:
        for name, make in systems.items():
            largest(book, name, make, guesses=depths, home=DEVICE, cap=cap, **shape)
    for parts in (4, 16):
        how = {"home": "cpu", "micro": parts, "cap": caps[0], "tokens": tokens, "steps": 1}
        if "error" not in book.add("fsdp2", measured(fsdp_offload, **whole, **how)):
            break


if __name__ == "__main__":
    main()
