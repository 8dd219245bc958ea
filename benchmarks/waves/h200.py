"""Two waves on one GPU beside eager, compiled and captured steps, and a larger batch.

    PYTHONPATH=src python benchmarks/waves/h200.py [--cap 8] [--only TEXT] [--steps 50]
    PYTHONPATH=src python benchmarks/waves/h200.py --toy      # on a processor, small

Every workload under one cap of memory, predicted from the times of its single ops: the whole batch,
one lane and two lanes of ours, replayed as one CUDA graph (as planned, and with at most 1.3 times
the memory of one wave), eager, and twice the batch at once: samples per second, the share of time
in which kernels run, the peak beside the planned one, and predicted against measured. Losses of two
lanes beside accumulation over 100 steps with deterministic kernels: the same bits. A system that
fails says why in its row. `all_rows.py` runs all workloads, `compiled_lanes.py` has the compiled
systems, `pairs.py` pairs of kernels.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from timing import GIB, Turns, start_counting, timed
from torch import nn
from workloads import TOYS, WORKLOADS, Workload, adamw, plain_step

from hocket.api import make_problem
from hocket.api.planned import find_cluster
from hocket.api.waves import waves_of
from hocket.capture.perform import draw_seed
from hocket.capture.program import Program
from hocket.capture.sizes import capture_sizes
from hocket.cost.measure import profile_program
from hocket.cost.profile import Profile, merge_profiles
from hocket.cost.roofline import Launches
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import WaveFit, WaveWay
from hocket.runtime.sessions.waves import waved_loop
from hocket.runtime.train.recorded import Kind, Recipe
from hocket.runtime.train.replayed_waves import ReplayedWaves
from hocket.runtime.train.update import planned_update
from hocket.training import prepare

_PROFILE_S = 4.0
"""For the ops of one size of batch."""


HEAD = (
    "| workload | system | samples/s | spread | kernels run | peak | memory "
    "| predicted / measured |\n|---|---|---|---|---|---|---|---|"
)


class System(NamedTuple):
    """A way to train, and what was predicted of it."""

    make: Callable[[], Callable[[], Any]]
    way: WaveWay


# ── systems ──────────────────────────────────────────────────────────────────────────────────────


class TracedOnce(Recipe):
    """A recipe that records a size of batch once: all systems of a workload have one program."""

    def trace(self, model: nn.Module, batch: Any, kind: Kind) -> tuple[Graph, Program]:
        """As recorded before."""
        key = kind, len(next(iter(batch.values())))
        if key not in _TRACED:
            _TRACED[key] = super().trace(model, batch, kind)
        return _TRACED[key]


_TRACED: dict[Any, tuple[Graph, Program]] = {}


class Case:
    """A workload on a device, with its plan of waves."""

    def __init__(
        self, build: Workload, samples: int, device: torch.device, cap: int, turns: Turns
    ) -> None:
        torch.manual_seed(0)
        self.model, batch = build(samples)
        self.samples, self.device = samples, device
        self.told = ""
        self.on = "1xh200" if device.type == "cuda" else "1xcpu-core"
        self.batch = {name: rows.to(device) for name, rows in batch.items()}
        update = planned_update(adamw(self.model), self.model)
        graph = capture_sizes(self.model, batch, optimizer=update, device=device.type)
        _TRACED.clear()
        self.recipe = TracedOnce(loss=None, update=update, device=device.type, name="waves")
        self.problem: Problem = make_problem(graph, self.on, profile=self._profile(samples, turns))
        launches: Launches = "replayed" if device.type == "cuda" else "eager"
        self.outlook = waves_of(self.problem, memory_bytes=cap, launches=launches)

    def _profile(self, samples: int, turns: Turns) -> Profile:
        """Times of all ops of the whole batch and of one wave."""
        (kind,) = find_cluster(self.on).kinds
        found = []
        for size in (samples, samples // 2):
            batch = {name: rows[:size] for name, rows in self.batch.items()}
            graph, program = self.recipe.trace(self.fresh(), batch, "train")
            with turns.turn():
                found.append(profile_program(graph, program, kind, device=self.device.type,
                                             budget_s=_PROFILE_S))  # fmt: skip
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

    def ours(self, plan: Plan, fit: WaveFit) -> Callable[[], Any]:
        """A step in one lane or two."""
        model = self.fresh()
        train = waved_loop(fit.problem, plan, model, self.batch, self.recipe, self.device)
        waves = train._carrier._waves

        def step() -> Any:
            found = train.step(self.batch)
            if isinstance(waves, ReplayedWaves):
                notes = waves.notes
                self.told = waves.refusal or f"{notes.num_waits} waits of {len(notes.lane)} calls"
            return found

        return step


def systems(case: Case) -> dict[str, System]:
    """Ways to train, by name, the most telling first; made when they are measured."""
    fit = case.outlook.fit
    quick, thin = quickest(fit), lean(fit)
    found = {
        "two lanes": System(lambda: case.ours(fit.plan_of(quick), fit), quick),
        "whole batch, replayed": System(case.whole, fit.plain),
        "two lanes, lean": System(lambda: case.ours(fit.plan_of(thin), fit), thin),
        "one lane, replayed": System(lambda: case.ours(one_lane(fit), fit), fit.accumulated),
    }
    return found


def quickest(fit: WaveFit) -> WaveWay:
    """Two lanes as they are planned, also where they do not pay."""
    return fit.chosen or fit.leanest


def lean(fit: WaveFit) -> WaveWay:
    """The quickest two lanes that hold little more than one wave."""
    return fit.lean or fit.leanest


def one_lane(fit: WaveFit) -> Plan:
    """The same microbatches, the second wave after the first."""
    passes = int((fit.problem.graph.op_phase != 2).sum())
    return fit.plan_of(quickest(fit)).having(Lanes(lead=passes))


def one_row(
    name: str, label: str, make: Callable[[], Callable[[], Any]], samples: int,
    device: torch.device, steps: int, turns: Turns, way: WaveWay | None,
) -> None:  # fmt: skip
    """A line of a system; one that fails says why."""
    if turns.left_s < 0:
        print(f"| {name} | {label} | no time left | | | | | |", flush=True)
        return
    try:
        start_counting(device)
        step = make()
        with turns.turn():
            row = timed(step, samples, device, steps)
    # One system that cannot run must not hide the others.
    except Exception as error:
        traceback.print_exc()
        print(f"| {name} | {label} | {type(error).__name__}: {str(error)[:150]} | | | | | |",
              flush=True)  # fmt: skip
        return
    ratio = "" if way is None else f"{way.samples_per_s / row.samples_per_s:.2f}"
    peaks = (
        ""
        if way is None
        else f", {(row.peak_bytes - row.scratch_bytes) / way.peak_bytes:.3f} of plan"
    )
    print(
        f"| {name} | {label} | {row.samples_per_s:,.1f} | {row.spread:.2f} | {row.busy:.0%} | "
        f"{row.peak_bytes / GIB:.3f} GiB{peaks} | reserved {row.reserved_bytes / GIB:.3f}, cuBLAS "
        f"{row.scratch_bytes / GIB:.3f} | {ratio} |",
        flush=True,
    )  # fmt: skip


def rows(name: str, case: Case, steps: int, turns: Turns) -> None:
    """A line per system."""
    for label, system in systems(case).items():
        one_row(name, label, system.make, case.samples, case.device, steps, turns, system.way)
        if case.told:
            print(f"| {name} | {label} | {case.told} | | | | | |", flush=True)
        case.told = ""


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────


def bits(name: str, case: Case, steps: int, turns: Turns) -> None:
    """Steps whose loss in two lanes is the same bits as one after the other."""
    if turns.left_s < 0:
        return
    fit = case.outlook.fit
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    plans = {"one lane": one_lane(fit), "two lanes": fit.plan_of(quickest(fit)),
             "lean": fit.plan_of(lean(fit))}  # fmt: skip
    losses: dict[str, list[float]] = {}
    for label, plan in plans.items():
        try:
            step = case.ours(plan, fit)
            with turns.turn():
                found = []
                for number in range(1, steps + 1):
                    torch.manual_seed(draw_seed(0, number, 0))
                    found.append(step())
                losses[label] = [float(loss) for loss in found]
        # Losses of the others are worth knowing.
        except Exception as error:
            print(f"| {name} | losses, {label} | {type(error).__name__}: {str(error)[:150]} | |",
                  flush=True)  # fmt: skip
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    first = losses.pop("one lane", [])
    for label, others in losses.items():
        same = sum(a == b for a, b in zip(first, others, strict=True))
        print(f"| {name} | same bits, {label} | {same} of {steps} steps, last loss "
              f"{others[-1]:.6f} | | | | | |", flush=True)  # fmt: skip


# ── one workload ─────────────────────────────────────────────────────────────────────────────────


def larger(build: Workload, samples: int, device: torch.device) -> Callable[[], Any]:
    """A step of plain PyTorch with more samples."""
    torch.manual_seed(0)
    model, batch = build(samples)
    return plain_step(model.to(device), {n: rows.to(device) for n, rows in batch.items()})


def compare(name: str, build: Workload, samples: int, options: argparse.Namespace) -> None:
    """All rows of a workload."""
    device = torch.device("cpu" if options.toy else "cuda")
    turns = Turns(options.lock, options.until)
    cap = int(options.cap * GIB)
    case = Case(build, samples, device, cap, turns)
    fit = case.outlook.fit
    gain = "nothing else fits" if fit.gain is None else f"{fit.gain:.2f} x"
    for label, way in (("planned", quickest(fit)), ("lean", lean(fit))):
        over = way.peak_bytes / fit.one_wave_bytes
        slab = fit.plan_of(way)[Lanes].slab_bytes
        print(f"| {name} | {label}: predicted gain {gain} | {way.samples_per_s:,.1f} | | | | "
              f"{way.peak_bytes / GIB:.3f} GiB planned, {over:.2f} x one wave "
              f"({fit.one_wave_bytes / GIB:.3f}), slab {slab / GIB:.3f} | |",
              flush=True)  # fmt: skip
    rows(name, case, options.steps, turns)
    if options.losses:
        bits(name, case, options.losses, turns)
    asked = case.outlook.other or fit
    one_row(name, "eager", case.plain, samples, device, options.steps, turns, asked.plain)
    one_row(name, "eager, twice the batch", lambda: larger(build, 2 * samples, device),
            2 * samples, device, options.steps, turns, None)  # fmt: skip


def main() -> int:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--cap", type=float, default=8.0, help="GiB")
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--losses", type=int, default=100, help="steps whose losses are compared")
    parser.add_argument("--lock", default="", help="file of who has the GPU")
    parser.add_argument("--until", type=float, default=math.inf, help="begin nothing after (epoch)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.toy and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --toy")
    if not options.toy:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
    print(HEAD, flush=True)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only in name:
            compare(name, build, samples, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
