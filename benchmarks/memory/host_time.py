"""Host time of a memory budget: of each policy per block, and of one model's steps by function.

    python benchmarks/memory/host_time.py                        (any device)
    python benchmarks/memory/host_time.py --model qwen3-0.6b --gib 11.1     (a GPU)

The first command trains a transformer of 24 tiny blocks, so that a step takes no more than the
host's time, under one policy for all blocks, and prints what the policy adds per block. The second
trains a model of `hard_cap.py` within a budget. It prints the seconds of each stage of
`hocket.prepare`, the host's seconds in each function of `hocket.runtime.offload`, and the host's
lead over the device at the edges of blocks.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_models import Layer
from hard_cap import MODELS, built, loss_of, synchronize
from torch import nn
from torch.nn import functional

import hocket
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.budgeted_model import BudgetedModel
from hocket.runtime.offload.copy_streams import CopyEvent
from hocket.runtime.offload.hooks import BlockHooks
from hocket.runtime.offload.host_optimizer import HostOptimizerThread
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.offload.recompute import _RecomputedRun
from hocket.runtime.offload.state_swap import StateSwap
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop

NUM_BLOCKS, WIDTH, NUM_TURNS = 24, 64, 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOST = {"parameters": "streamed", "update": "host"}
POLICIES: dict[str, dict[str, str]] = {
    "kept": {},
    "recomputed": {"activations": "recomputed"},
    "recomputed from the host": {"activations": "recomputed", "checkpoint": "offloaded"},
    "offloaded": {"activations": "offloaded"},
    "resident, updated on the host": {"update": "host"},
    "streamed, updated on the host": HOST,
    "streamed, state swapped in": {"parameters": "streamed", "update": "device"},
    "minimum memory": {"activations": "recomputed", "checkpoint": "offloaded", **HOST},
}
Step = Callable[[], Any]


class Tiny(nn.Module):
    """A transformer whose kernels take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def step_of(policy: dict[str, str] | None) -> Step:
    """A training step with one policy for all blocks, or of plain PyTorch."""
    torch.manual_seed(0)
    model = Tiny().to(DEVICE)
    batch = torch.randn(1, 8, WIDTH, device=DEVICE), torch.zeros(1, 8, dtype=torch.long).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if policy is None:

        def plain() -> None:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return plain
    update = planned_update(optimizer, model)
    options = TraceOptions(update=update, device=DEVICE.type, forward=lambda model, b: model(*b))
    blocks = tuple(MemoryBlock(name=f"blocks.{n}", **policy) for n in range(NUM_BLOCKS))
    plan = BudgetPlan(Memory(budget_bytes=(2**40,), blocks=blocks), None)
    strategy = BudgetedModel(model.cpu(), batch, options, plan, DEVICE)
    loop = TrainingLoop(model, optimizer, strategy, LoopOptions())
    return lambda: loop.step(batch)


def policies() -> Iterator[str]:
    """Lines with the least time of a step of each policy, and what it adds per block."""
    steps = {"plain PyTorch": step_of(None), **{k: step_of(p) for k, p in POLICIES.items()}}
    least_s = dict.fromkeys(steps, float("inf"))
    for _ in range(NUM_TURNS):
        for name, step in steps.items():
            synchronize()
            started = time.perf_counter()
            step()
            synchronize()
            least_s[name] = min(least_s[name], time.perf_counter() - started)
    plain = least_s["plain PyTorch"]
    yield "| policy | ms | us per block beside plain PyTorch |\n|---|---|---|"
    for name, taken in least_s.items():
        yield f"| {name} | {taken * 1e3:.2f} | {(taken - plain) / NUM_BLOCKS * 1e6:.0f} |"


# ── one model ────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """Host seconds and calls of functions, and events at the edges of blocks."""

    def __init__(self) -> None:
        self.seconds, self.calls = defaultdict[str, float](float), defaultdict[str, int](int)
        self.edges: list[tuple[str, float, Any]] = []

    def time(self, owner: type, name: str, *, is_edge: bool = False) -> None:
        """Count a method's seconds from now on."""
        method, called = getattr(owner, name), f"{owner.__name__}.{name}"

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            if is_edge and DEVICE.type == "cuda":
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record()
                self.edges.append((name, started, event))
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[called] += time.perf_counter() - started
                self.calls[called] += 1

        setattr(owner, name, timed)

    def lead(self, started: float, start: Any) -> Iterator[str]:
        """The host's time and the device's at every fourth edge, in ms from the step's start."""
        for number, (name, at, event) in enumerate(self.edges):
            if number % 4 == 0:
                there = start.elapsed_time(event)
                yield f"  {name} {number}: host {(at - started) * 1e3:.1f}, device {there:.1f}"


def one_model(name: str, budget: int, steps: int) -> Iterator[str]:
    """Lines about stages of `prepare`, and about steps."""
    model, batch = built(name, DEVICE.type != "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    profile = cProfile.Profile()
    started = time.perf_counter()
    profile.enable()
    train = hocket.prepare(model, optimizer, batch, forward=loss_of, memory=budget,
                           async_update=True)  # fmt: skip
    profile.disable()
    yield f"prepare {time.perf_counter() - started:.1f} s (profiled)"
    found = pstats.Stats(profile)
    for (file, _, function), row in sorted(found.stats.items(), key=lambda e: -e[1][3])[:90]:  # type: ignore[attr-defined]
        if "hocket" in file:
            yield f"  {row[3]:7.2f} s {row[1]:7d} calls  {file.rpartition('hocket/')[2]}:{function}"
    for _ in range(steps):
        train.step(batch)
    kept = train.memory
    assert kept is not None
    taken = []
    for _ in range(6):
        synchronize()
        started = time.perf_counter()
        train.step(batch)
        synchronize()
        taken.append(time.perf_counter() - started)
    yield f"step {sorted(taken)[3] * 1e3:.1f} ms, predicted {(kept.step_s or 0) * 1e3:.1f}"
    yield f"{kept.section.loss_chunks} chunks"
    for block in kept.section.blocks[:8]:
        activations = f"{block.activations} {block.share} {block.checkpoint}"
        yield f"  {block.name} {activations}, {block.parameters} {block.update}"
    clock = Clock()
    for method in ("call", "_pre_backward"):
        clock.time(BlockHooks, method, is_edge=True)
    for owner, methods in {
        BlockHooks: ("_fetch_parameters", "_post_forward", "_post_backward", "_prefetch_next",
                     "_refresh", "_end_backward", "begin"),
        HostOptimizerThread: ("wait", "submit"), CopyEvent: ("synchronize", "wait"),
        StateSwap: ("update", "prefetch", "_update_chunk", "_write_back", "_fetch"),
        BudgetedModel: ("_settle", "finish_block", "_passes", "_forward", "update"),
        _RecomputedRun: ("_recompute",),
    }.items():  # fmt: skip
        for method in methods:
            clock.time(owner, method)
    for number in range(4):
        for each in (clock.seconds, clock.calls, clock.edges):
            each.clear()  # type: ignore[attr-defined]
        synchronize()
        start: Any = None
        if DEVICE.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if start is not None:
            start.record()
        started = time.perf_counter()
        train.step(batch)
        asked = time.perf_counter() - started
        synchronize()
        taken_ms = (time.perf_counter() - started) * 1e3
        yield f"timed step {number}: {taken_ms:.1f} ms, launched after {asked * 1e3:.1f}"
    for called, seconds in sorted(clock.seconds.items(), key=lambda each: -each[1]):
        yield f"  {seconds * 1e3:8.2f} ms {clock.calls[called]:5d} calls  {called}"
    if start is not None:
        yield from clock.lead(started, start)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="part of a model's name in hard_cap.py")
    parser.add_argument("--gib", type=float, default=11.1)
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if not arguments.model:
        torch.set_num_threads(1)
        lines = policies()
    else:
        name = next(each for each in MODELS if arguments.model in each)
        lines = one_model(name, int(arguments.gib * 2**30), arguments.steps)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
