"""Two waves on one GPU beside eager, compiled and captured steps, and a larger batch.

    PYTHONPATH=src python benchmarks/waves/h200.py [--cap 8] [--only TEXT] [--steps 100] [--pairs]
    PYTHONPATH=src python benchmarks/waves/h200.py --toy      # on a processor, small

Three tables. With ``--pairs``, rows of kernels on two streams, to judge the model of shares by.
Every workload under one cap of memory, predicted from the times of its single ops: eager, compiled,
compiled with CUDA graphs, one lane and two lanes of ours (replayed as one CUDA graph, as planned
and both from the start; asked for op by op on two streams), and the whole or twice the batch at
once: samples per second, the share of time in which kernels run, the peak, and predicted against
measured. Losses of two lanes beside accumulation over many steps with deterministic kernels: the
same bits. A system that fails says why in its row.
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
from hocket.api.planned import find_cluster
from hocket.api.waves import waves_of
from hocket.capture.loss import ChosenLoss
from hocket.capture.perform import draw_seed
from hocket.capture.sizes import capture_sizes
from hocket.cost.measure import profile_program
from hocket.cost.profile import Profile, merge_profiles
from hocket.cost.roofline import Launches
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import WaveFit
from hocket.runtime.sessions.waves import waved_loop
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.update import planned_update
from hocket.simulate import simulate
from hocket.training import prepare

GIB = 2**30
_WARM = 3
_PROFILE_S = 12.0
"""For the ops of one size of batch."""


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
    """Steps of a system in five rows without a wait inside: the median row."""
    for _ in range(_WARM):
        step()
    _settle(device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(max(1, steps // 5)):
            step()
        _settle(device)
        seconds.append((time.perf_counter() - start) / max(1, steps // 5))
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
        self.on = "1xh200" if device.type == "cuda" else "1xcpu-core"
        self.batch = {name: rows.to(device) for name, rows in batch.items()}
        update = planned_update(adamw(self.model), self.model)
        graph = capture_sizes(self.model, batch, optimizer=update, device=device.type)
        self.recipe = Recipe(loss=None, update=update, device=device.type, name="waves")
        self.problem: Problem = make_problem(graph, self.on, profile=self._profile(samples))
        launches: Launches = "replayed" if device.type == "cuda" else "eager"
        self.outlook = waves_of(self.problem, memory_bytes=cap, launches=launches)

    def _profile(self, samples: int) -> Profile:
        """Times of all ops of the whole batch and of one wave."""
        (kind,) = find_cluster(self.on).kinds
        found = []
        for size in (samples, samples // 2):
            batch = {name: rows[:size] for name, rows in self.batch.items()}
            graph, program = self.recipe.trace(self.fresh(), batch, "train")
            place = self.device.type
            found.append(profile_program(graph, program, kind, device=place, budget_s=_PROFILE_S))
        return merge_profiles(found)

    def fresh(self) -> nn.Module:
        """The model with its first weights."""
        return copy.deepcopy(self.model).to(self.device)

    def plain(self, **options: Any) -> Callable[[], Any]:
        """A step of plain PyTorch, eager or compiled."""
        return plain_step(self.fresh(), self.batch, **options)

    def whole(self) -> Callable[[], Any]:
        """All samples at once by ``hocket.prepare``, replayed on a GPU."""
        model = self.fresh()
        train = prepare(model, adamw(model), self.batch, on=self.on)
        return lambda: train.step(self.batch)

    def ours(self, plan: Plan, fit: WaveFit, *, replay: bool = True) -> Callable[[], Any]:
        """A step in one lane or two."""
        model = self.fresh()
        train = waved_loop(fit.problem, plan, model, self.batch, self.recipe, self.device,
                           replay=replay)  # fmt: skip
        return lambda: train.step(self.batch)


def systems(case: Case) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Ways to train, by name, made when they are measured."""
    fit = case.outlook.fit
    asked = case.outlook.other or fit
    found: dict[str, Callable[[], Callable[[], Any]]] = {
        "eager": case.plain,
        "whole batch, replayed": case.whole,
        "one lane, replayed": lambda: case.ours(one_lane(planned(fit), fit), fit),
        "two lanes, replayed": lambda: case.ours(planned(fit), fit),
        "two lanes from the start": lambda: case.ours(together(fit), fit),
        "two lanes, op by op": lambda: case.ours(planned(asked), asked, replay=False),
    }
    if case.device.type == "cuda":
        found |= {
            "compiled + CUDA graphs": lambda: case.plain(mode="reduce-overhead"),
            "compiled": lambda: case.plain(mode="default"),
        }
    return found


def planned(fit: WaveFit) -> Plan:
    """The plan of two lanes, also where it does not pay."""
    return fit.plan_of(fit.chosen or fit.leanest)


def together(fit: WaveFit) -> Plan:
    """Both waves begin at once."""
    return planned(fit).having(Lanes(lead=0))


def one_lane(plan: Plan, fit: WaveFit) -> Plan:
    """The same microbatches, the second wave after the first."""
    passes = int((fit.problem.graph.op_phase != 2).sum())
    return plan.having(Lanes(lead=passes))


def rows(case: Case, steps: int) -> None:
    """A line per system."""
    fit = case.outlook.fit
    asked = case.outlook.other or fit
    predicted = {
        "eager": asked.plain.samples_per_s,
        "whole batch, replayed": fit.plain.samples_per_s,
        "one lane, replayed": fit.accumulated.samples_per_s,
        "two lanes, replayed": (fit.chosen or fit.leanest).samples_per_s,
        "two lanes from the start": case.samples / simulate(fit.problem, together(fit)).makespan_s,
        "two lanes, op by op": (asked.chosen or asked.leanest).samples_per_s,
    }
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
    plan = planned(fit)
    losses = []
    for chosen in (plan, one_lane(plan, fit)):
        step = case.ours(chosen, fit)
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


def pairs() -> None:
    """How much longer two rows of kernels take on two streams than one row alone."""
    print("| pair | alone | together | pace of each |")
    print("|---|---|---|---|")
    for first, one in PAIRS.items():
        for second, two in PAIRS.items():
            repeats = 20 if "large product" in (first, second) else 200
            alone = max(_row_s([one()], repeats), _row_s([two()], repeats))
            both = _row_s([one(), two()], repeats)
            print(f"| {first} + {second} | {alone * 1e3:.2f} ms | {both * 1e3:.2f} ms | "
                  f"{alone / both:.2f} |", flush=True)  # fmt: skip


def _row_s(operands: list[tuple[torch.Tensor, ...]], repeats: int) -> float:
    """Seconds of a captured row of products on a stream for each pair of operands."""
    streams = [torch.cuda.Stream() for _ in operands]
    for stream, (left, right) in zip(streams, operands, strict=True):
        # Libraries make what they need for a stream at its first use, which no graph may hold.
        with torch.cuda.stream(stream):
            torch.mm(left, right)
    torch.cuda.synchronize()
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
    parser.add_argument("--pairs", action="store_true", help="pairs of kernels, too")
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
        if options.pairs:
            pairs()
    print("| workload | system | samples/s | kernels run | peak | predicted / measured |")
    print("|---|---|---|---|---|---|")
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only not in name:
            continue
        case = Case(build, samples, device, cap)
        fit = case.outlook.fit
        gain = "nothing else fits" if fit.gain is None else f"{fit.gain:.2f} x"
        lane = fit.chosen or fit.leanest
        over = lane.peak_bytes / fit.accumulated.peak_bytes
        print(f"| {name} | predicted gain {gain} | | | {lane.peak_bytes / GIB:.2f} GiB planned, "
              f"{over:.2f} x one wave | |", flush=True)  # fmt: skip
        rows(case, steps)
        torch.use_deterministic_algorithms(True, warn_only=True)
        same = same_losses(case, steps)
        torch.use_deterministic_algorithms(False)
        print(f"|  | same bits | {same} of {steps} steps | | | |", flush=True)
        torch.manual_seed(0)
        model, batch = build(2 * samples)
        larger = plain_step(model.to(device), {n: rows.to(device) for n, rows in batch.items()})
        row = timed(larger, 2 * samples, device, steps)
        print(f"|  | eager, twice the batch | {row.samples_per_s:,.1f} | {row.busy:.0%} | "
              f"{row.peak_bytes / GIB:.2f} GiB | |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
