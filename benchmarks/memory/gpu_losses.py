"""Losses of many steps beside plain PyTorch: in float32 and float64 with kernels that give the same
bits from run to run, and in bfloat16.

With every block recomputed, where no sum is made in another order; the same with the loss in
chunks; and within half of the memory, with updates on the host. Beside it: what plain PyTorch
itself changes from run to run, and by adding up the same samples in two parts. All are clipped by
norm.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from budget_case import Case
from gpu_models import DEVICE, Sizes, forward, gpt, plain_forward, word_batch
from gpu_rows import clear
from gpu_run import Run
from gpu_systems import adamw

from hocket.planners.memory.maker import FULL_RECOMPUTE
from hocket.runtime.offload.plan_choice import BudgetPlan


def exact_losses(run: Run) -> None:
    """In float32 and float64, with the same bits from run to run."""
    # Read when cuBLAS starts, so this needs a process of its own.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # For the whole process: what runs again in the backward pass must take the same kernels.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    _compare(run, "float64, deterministic kernels", torch.float64, plain_forward, *run.smallest)
    _compare(run, "float32, deterministic kernels", torch.float32, plain_forward, *run.small)


def rounded_losses(run: Run) -> None:
    """Under bfloat16 autocast, with the kernels that PyTorch takes by itself."""
    _compare(run, "bfloat16 autocast", torch.float32, forward, *run.small)


def _compare(run: Run, name: str, dtype: torch.dtype, loss_of: Any, width: int, layers: int,
             sizes: Sizes) -> None:  # fmt: skip
    torch.set_num_threads(2)  # Others run beside it.
    batch, steps = word_batch(sizes), run.num_steps
    build = lambda home: gpt(width, layers, sizes, home).to(dtype)  # noqa: E731
    clear()
    theirs = plain_losses(build(DEVICE), batch, loss_of, 1, steps)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 2**20
    row: dict[str, Any] = {"in": name, "steps": steps, "last": theirs[-1]}
    row["params"] = sum(p.numel() for p in build("cpu").parameters())
    for key, parts in (("plain_again", 1), ("plain_in_two_parts", 2)):
        clear()
        row[key] = worst(plain_losses(build(DEVICE), batch, loss_of, parts, steps), theirs)
    clear()
    case = Case(build("cpu"), batch, loss_of, on="auto", device=torch.device(DEVICE))
    full = case.frontier.find(FULL_RECOMPUTE)
    assert full is not None
    assert full.memory is not None
    plans = {
        "recomputed": BudgetPlan(full.memory, 0),
        "in_chunks": BudgetPlan(replace(full.memory, loss_chunks=8), 0),
        "within_half": case.chosen(max(peak // 2, case.budgets(2)[0])),
    }
    for key, kept in plans.items():
        model = build("cpu")
        train = case.loop(model, kept, adamw(model), clip_norm=1.0)
        mine = [float(train.step(batch)) for _ in range(steps)]
        row[key] = {
            "worst": worst(mine, theirs), "chunks": kept.section.loss_chunks,
            "same_bits": sum(a == b for a, b in zip(mine, theirs, strict=True)),
            "blocks": Counter(f"{b.activations}/{b.parameters}/{b.update}"
                              for b in kept.section.blocks),
        }  # fmt: skip
        del train, model
        clear()
    run.book.add("losses", row)


def plain_losses(model: Any, batch: Any, loss_of: Any, parts: int, steps: int) -> list[float]:
    """Steps of plain PyTorch that adds up the gradients of so many parts."""
    # As hocket updates: fused on a GPU, and on a processor as the optimizer says.
    optimizer, found = adamw(model, **({"fused": True} if DEVICE == "cuda" else {})), []
    for _ in range(steps):
        total = 0.0
        for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
            loss = loss_of(model, part) / parts
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def worst(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=False))
