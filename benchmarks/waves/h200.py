"""Two waves on one GPU beside eager, compiled and captured steps, and a larger batch.

    PYTHONPATH=src .venv/bin/python benchmarks/waves/h200.py [--cap 8] [--only TEXT] [--steps 100]
    PYTHONPATH=src .venv/bin/python benchmarks/waves/h200.py --toy      # on a processor, small

Three tables. Pairs of kernels on two streams against what the model of shares says. Every workload
under one cap of memory: eager, compiled, compiled with CUDA graphs, one lane and two lanes of ours
(two streams; the same captured as one CUDA graph), and twice the batch at once: samples per second,
the share of time in which kernels run, the peak, and predicted against measured. Losses of two
lanes beside accumulation over many steps with deterministic kernels: the same bits. A system that
fails says why in its row.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from workloads import TOYS, WORKLOADS, Workload

from hocket.api import make_problem
from hocket.api.waves import waves_of
from hocket.capture.loss import ChosenLoss
from hocket.capture.perform import draw_seed
from hocket.capture.sizes import capture_sizes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import WaveFit
from hocket.runtime.sessions.waves import waved_loop
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.update import planned_update

GIB = 2**30
_WARM = 3


class Row(NamedTuple):
    """What a system did."""

    samples_per_s: float
    busy: float
    """Share of the time in which kernels ran; 0 on a processor."""
    peak_bytes: int


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all rows."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# ── timing ───────────────────────────────────────────────────────────────────────────────────────


def timed(step: Callable[[], Any], samples: int, device: torch.device, steps: int) -> Row:
    """Steps of a system: the median of their times."""
    for _ in range(_WARM):
        step()
    _settle(device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        _settle(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Row(samples / statistics.median(seconds), busy_share(step, device), peak)


def busy_share(step: Callable[[], Any], device: torch.device) -> float:
    """The share of a step in which at least one kernel runs."""
    if device.type != "cuda":
        return 0.0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        step()
        _settle(device)
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


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ── systems ──────────────────────────────────────────────────────────────────────────────────────


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> Any:
    """A step of plain PyTorch, compiled where there are options."""
    optimizer, loss_of = adamw(model), ChosenLoss(None)
    run = torch.compile(model, **options) if options else model

    def step() -> torch.Tensor:
        loss = loss_of(run(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class Case:
    """A workload on a device, with its plan of waves."""

    def __init__(self, build: Workload, samples: int, device: torch.device, cap: int) -> None:
        torch.manual_seed(0)
        self.model, batch = build(samples)
        self.samples, self.device = samples, device
        self.batch = {name: rows.to(device) for name, rows in batch.items()}
        update = planned_update(adamw(self.model), self.model)
        graph = capture_sizes(self.model, batch, optimizer=update, device=device.type)
        on = "1xh200" if device.type == "cuda" else "1xcpu-core"
        self.problem: Problem = make_problem(graph, on)
        self.outlook = waves_of(self.problem, memory_bytes=cap)
        self.recipe = Recipe(loss=None, update=update, device=device.type, name="waves")

    def fresh(self) -> nn.Module:
        """The model with its first weights."""
        return copy.deepcopy(self.model).to(self.device)

    def plain(self, **options: Any) -> Callable[[], Any]:
        """A step of plain PyTorch, eager or compiled."""
        return plain_step(self.fresh(), self.batch, **options)

    def ours(self, plan: Plan, fit: WaveFit) -> tuple[Callable[[], Any], Any]:
        """A step in one lane or two, and its loop."""
        train = waved_loop(fit.problem, plan, self.fresh(), self.batch, self.recipe, self.device)
        return lambda: train.step(self.batch), train


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The same step, captured once as a CUDA graph and replayed; lanes fork and join inside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def systems(case: Case) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Ways to train, by name, made when they are measured."""
    fit = case.outlook.fit
    way = fit.chosen or fit.leanest
    plan = fit.plan_of(way)
    found: dict[str, Callable[[], Callable[[], Any]]] = {
        "eager": case.plain,
        "two lanes, streams": lambda: case.ours(plan, fit)[0],
    }
    if case.device.type == "cuda":
        found |= {
            "compiled": lambda: case.plain(mode="default"),
            "compiled + CUDA graphs": lambda: case.plain(mode="reduce-overhead"),
            "one lane, captured": lambda: captured(case.ours(one_lane(plan, fit), fit)[0]),
            "two lanes, captured": lambda: captured(case.ours(plan, fit)[0]),
        }
    return found


def one_lane(plan: Plan, fit: WaveFit) -> Plan:
    """The same microbatches, the second wave after the first."""
    passes = int((fit.problem.graph.op_phase != 2).sum())
    return plan.having(Lanes(lead=passes))


def rows(case: Case, steps: int) -> None:
    """A line per system."""
    fit = case.outlook.fit
    predicted = {
        "two lanes, streams": (fit.chosen or fit.leanest).samples_per_s,
        "eager": fit.plain.samples_per_s,
    }
    other = case.outlook.other
    if other is not None:
        predicted["two lanes, captured"] = (other.chosen or other.leanest).samples_per_s
        predicted["one lane, captured"] = other.accumulated.samples_per_s
    for name, make in systems(case).items():
        if case.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            row = timed(make(), case.samples, case.device, steps)
        # One system that cannot run must not hide the others.
        except Exception as error:
            print(f"|  | {name} | {type(error).__name__}: {str(error)[:60]} | | | |", flush=True)
            continue
        told = predicted.get(name)
        ratio = "" if told is None else f"{told / row.samples_per_s:.2f}"
        print(
            f"|  | {name} | {row.samples_per_s:,.1f} | {row.busy:.0%} | "
            f"{row.peak_bytes / GIB:.2f} GiB | {ratio} |",
            flush=True,
        )


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────


def same_losses(case: Case, steps: int) -> int:
    """Of so many steps, those whose loss in two lanes is the same bits as one after the other."""
    fit = case.outlook.fit
    plan = fit.plan_of(fit.chosen or fit.leanest)
    losses = []
    for chosen in (plan, one_lane(plan, fit)):
        step, _ = case.ours(chosen, fit)
        found = []
        for number in range(1, steps + 1):
            torch.manual_seed(draw_seed(0, number, 0))
            found.append(step().item())
        losses.append(found)
    return sum(a == b for a, b in zip(*losses, strict=True))


# ── pairs of kernels ─────────────────────────────────────────────────────────────────────────────

PAIRS = {
    "small product": lambda: (torch.randn(256, 256, device="cuda"),) * 2,
    "large product": lambda: (torch.randn(8192, 8192, device="cuda"),) * 2,
}
"""Operands of products that ask for little and for all of the device."""


def pairs(repeats: int = 200) -> None:
    """How much longer two rows of kernels take on two streams than one row alone."""
    print("| pair | alone | together | pace of each |")
    print("|---|---|---|---|")
    for first, one in PAIRS.items():
        for second, two in PAIRS.items():
            alone = max(_row_s([one()], repeats), _row_s([two()], repeats))
            both = _row_s([one(), two()], repeats)
            print(f"| {first} + {second} | {alone * 1e3:.2f} ms | {both * 1e3:.2f} ms | "
                  f"{alone / both:.2f} |", flush=True)  # fmt: skip


def _row_s(operands: list[tuple[torch.Tensor, ...]], repeats: int) -> float:
    """Seconds of a captured row of products on a stream for each pair of operands."""
    streams = [torch.cuda.Stream() for _ in operands]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for stream, (left, right) in zip(streams, operands, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    torch.mm(left, right)
        for stream in streams:
            here.wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--cap", type=float, default=8.0, help="GiB")
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.toy and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --toy")
    device = torch.device("cpu" if options.toy else "cuda")
    cap, steps = int(options.cap * GIB), 3 if options.toy else options.steps
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total)
        torch.use_deterministic_algorithms(True, warn_only=True)
        pairs()
    print("| workload | system | samples/s | kernels run | peak | predicted / measured |")
    print("|---|---|---|---|---|---|")
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only not in name:
            continue
        case = Case(build, samples, device, cap)
        fit = case.outlook.fit
        gain = "nothing else fits" if fit.gain is None else f"{fit.gain:.2f} x"
        print(f"| {name} | predicted gain {gain} | | | | |", flush=True)
        rows(case, steps)
        print(f"|  | same bits | {same_losses(case, steps)} of {steps} steps | | | |", flush=True)
        torch.manual_seed(0)
        model, batch = build(2 * samples)
        larger = plain_step(model.to(device), {n: rows.to(device) for n, rows in batch.items()})
        row = timed(larger, 2 * samples, device, steps)
        print(f"|  | eager, twice the batch | {row.samples_per_s:,.1f} | {row.busy:.0%} | "
              f"{row.peak_bytes / GIB:.2f} GiB | |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
