"""One training step on one GPU: plain PyTorch, ``torch.compile`` and ``hocket.prepare``.

    PYTHONPATH=src python benchmarks/runtime/train_gpu.py [--steps 20] [--only CASE] [--twice]

The same model, weights, batches and fused AdamW for all three, dropout on; times are those of
whole steps, host included, the device being waited for only at the end of all of them. Losses of
plain PyTorch and of hocket are compared step by step, and with ``--twice`` also those of plain
PyTorch with itself, and of both without atomic sums (attention as matrix products): what plain
PyTorch differs by from itself is no difference of ours.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hocket.capture.real import BuiltForReal
from hocket.capture.zoo.load import load_model
from hocket.training import prepare

_NUM_WARM = 5
"""Steps before the clock runs: kernels are chosen, graphs captured."""


class Case(NamedTuple):
    """A model at a size."""

    model: str
    batch: int
    seq: int | None
    dtype: str
    goal: float
    """Of hocket, as a multiple of plain PyTorch."""


CASES = {
    "gpt2-8x1024-f32": Case("gpt2", 8, 1024, "float32", 1.0),
    "gpt2-8x1024-bf16": Case("gpt2", 8, 1024, "bfloat16", 1.0),
    "resnet50-64": Case("resnet50", 64, None, "float32", 1.0),
    "bert-8x128-bf16": Case("bert-large", 8, 128, "bfloat16", 0.6),
    "gpt2-1x128-bf16": Case("gpt2", 1, 128, "bfloat16", 0.6),
}


def built(case: Case, device: str) -> tuple[nn.Module, Any]:
    """The model with weights drawn from one seed, and its batch."""
    torch.manual_seed(0)
    with BuiltForReal():
        model, batch = load_model(
            case.model, batch=case.batch, seq=case.seq, dtype=case.dtype, device="cpu"
        )
    model = model.to(device).train()
    return model, {key: value.to(device) for key, value in batch.items()}


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model of the zoo returns."""
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The update of all three."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(model: nn.Module, batch: Any) -> Callable[[], torch.Tensor]:
    """A step as everybody writes it."""
    optimizer = optimizer_of(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def with_hocket(model: nn.Module, batch: Any) -> Callable[[], torch.Tensor]:
    """Return the same step by `hocket.prepare`."""
    train = prepare(model, optimizer_of(model), batch)
    return lambda: train.step(batch)


def timed(step: Callable[[], torch.Tensor], steps: int) -> tuple[float, list[float]]:
    """Seconds per step, and the first losses."""
    torch.manual_seed(1)
    losses = [step() for _ in range(_NUM_WARM)]
    best = float("inf")
    for _ in range(3):
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        best = min(best, (time.perf_counter() - began) / max(steps, 1))
    return best, [float(loss) for loss in losses]


def wait() -> None:
    """Wait until the device has finished all launched kernels."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(case: Case, steps: int, device: str, compiled: bool) -> dict[str, Any]:
    """Measure all candidates on one case."""
    candidates: dict[str, Callable[..., Any]] = {"eager": plain, "hocket": with_hocket}
    if compiled:
        candidates["compile"] = lambda model, batch: plain(torch.compile(model), batch)
    original, batch = built(case, device)
    row: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    for name, candidate in candidates.items():
        model = copy.deepcopy(original)
        began = time.perf_counter()
        try:
            step_s, losses[name] = timed(candidate(model, batch), steps)
        # A candidate that fails must not lose the others: the machine is lent for minutes.
        except Exception as error:
            row[f"{name}_error"] = repr(error)[:400]
            continue
        row[f"{name}_ms"] = 1e3 * step_s
        row[f"{name}_ready_s"] = time.perf_counter() - began - 3 * steps * step_s
        row[f"{name}_peak_gib"] = peak_gib()
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if "hocket_ms" in row and "eager_ms" in row:
        row["ratio"] = row["hocket_ms"] / row["eager_ms"]
        row["difference"] = max(
            abs(a - b) for a, b in zip(losses["eager"], losses["hocket"], strict=True)
        )
    return {**row, "goal": case.goal}


def differences(case: Case, device: str) -> dict[str, float]:
    """Largest differences of the first losses: of plain PyTorch twice, and without atomic sums."""
    original, batch = built(case, device)

    def losses(candidate: Callable[..., Any]) -> list[float]:
        return timed(candidate(copy.deepcopy(original), batch), 0)[1]

    def apart(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(one, other, strict=True))

    found = {"eager_twice": apart(losses(plain), losses(plain))}
    with sdpa_kernel(SDPBackend.MATH):
        found["without_atomics"] = apart(losses(plain), losses(with_hocket))
    return found


def peak_gib() -> float:
    """Most that was allocated since the last time."""
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> None:
    """Measure, one line of JSON per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--twice", action="store_true", help="What losses differ by, and why.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {}
    for name in arguments.only or CASES:
        case = CASES[name]
        rows[name] = (
            differences(case, device)
            if arguments.twice
            else measure(case, arguments.steps, device, not arguments.no_compile)
        )
        print(json.dumps({"case": name, **rows[name]}), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
