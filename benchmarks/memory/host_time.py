"""What keeping a budget takes of the host: steps so small that nothing else counts.

    PYTHONPATH=src:benchmarks/memory python benchmarks/memory/host_time.py

A ResNet of 270 convolutions in 10 blocks and an LSTM of 400 steps in 20 pieces, both 8 wide, batch
1, on one core: processor seconds of a step, also in steps of plain PyTorch with a fused update, the
least of several by turns. Where the work is this small, what a policy adds is the host's time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_models import DeepResNet, LongRnn, plain_forward
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.budgeted_model import BudgetedModel
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop

NUM_TURNS = 15
POLICIES: dict[str, dict[str, str]] = {
    "kept": {},
    "recomputed": {"activations": "recomputed"},
    "offloaded": {"activations": "offloaded"},
    "streamed, updated on the host": {"parameters": "streamed", "update": "host"},
    "leanest": {
        "activations": "recomputed", "checkpoint": "offloaded", "parameters": "streamed",
        "update": "host",
    },
}  # fmt: skip
Step = Callable[[], Any]


def made(kind: str) -> tuple[nn.Module, Any, list[str]]:
    """A model, its batch, and the paths of its blocks."""
    torch.manual_seed(0)
    if kind == "resnet":
        model: Any = DeepResNet(270, 28, 8)
        return model, (torch.randn(1, 3, 28, 28), torch.zeros(1, dtype=torch.long)), [
            f"blocks.{n}" for n in range(len(model.blocks))]  # fmt: skip
    model = LongRnn(400, 8)
    return model, (torch.randn(1, 400, 8), torch.zeros(1, 400, dtype=torch.long)), [
        f"pieces.{n}" for n in range(len(model.pieces))]  # fmt: skip


def plain(kind: str, *, checkpoints: bool) -> Step:
    """Plain PyTorch, with its checkpoints around the blocks."""
    model, batch, paths = made(kind)
    for path in paths if checkpoints else ():
        block: Any = model.get_submodule(path)
        inner = block.forward
        block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(kind: str, policy: Any) -> Step:
    """One policy for all blocks."""
    model, batch, paths = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    update = planned_update(optimizer, model)
    recipe = TraceOptions(update=update, device="cpu", forward=plain_forward)
    blocks = tuple(MemoryBlock(name=path, **policy) for path in paths)
    kept = BudgetPlan(Memory(budget_bytes=(2**40,), blocks=blocks), None)
    strategy = BudgetedModel(model, batch, recipe, kept, torch.device("cpu"))
    loop = TrainingLoop(model, optimizer, strategy, LoopOptions())
    return lambda: loop.step(batch)


def rows(kind: str) -> Iterator[tuple[str, float]]:
    """Processor seconds of a step of each kind."""
    steps = {"plain PyTorch": plain(kind, checkpoints=False),
             "its checkpoints": plain(kind, checkpoints=True),
             **{name: ours(kind, policy) for name, policy in POLICIES.items()}}  # fmt: skip
    least_s = dict.fromkeys(steps, float("inf"))
    for _ in range(NUM_TURNS):
        for name, step in steps.items():
            began = time.process_time()
            step()
            least_s[name] = min(least_s[name], time.process_time() - began)
    yield from least_s.items()


def main() -> None:
    """A table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {kind: dict(rows(kind)) for kind in ("resnet", "rnn")}
    print("| | " + " | ".join(found) + " |\n|---|---|---|")
    for name in next(iter(found.values())):
        told = (
            f"{f[name] * 1e3:.1f} ms, {f[name] / f['plain PyTorch']:.2f}" for f in found.values()
        )
        print(f"| {name} | " + " | ".join(told) + " |")


if __name__ == "__main__":
    main()
