"""Two waves on one GPU beside the same samples without waves: predicted and measured.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/h200.py [--only TEXT] [--steps 50]
    … --toy     # on a CPU, small

Each workload is profiled, planned with measured op times, and trained in four ways: the whole batch
replayed as one CUDA graph, its halves one after the other, two waves as planned, and the whole
batch with ``compiled=True``. A row has samples per second and memory, each beside the prediction.
Memory is what the caching allocator reserves, warm-up steps included.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from workloads import TOYS, WORKLOADS, Workload, adamw

from hocket.api.waves import waves_of
from hocket.base.units import format_bytes
from hocket.capture.sizes import capture_sizes
from hocket.cost.measure import profile_program
from hocket.cost.profile import merge_profiles
from hocket.plan.files import SavedPlan
from hocket.plan.make import find_cluster, make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Waves
from hocket.planners.waves.wave_candidate import WaveCandidate
from hocket.planners.waves.wave_search import WaveFit
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.synthetic_training import SyntheticModel, SyntheticTraining
from hocket.runtime.trace_options import TraceOptions
from hocket.simulate.parallel.wave_streams import pass_order
from hocket.training import prepare

_PROFILE_S = 4.0
"""For the ops of one size of batch."""


class Case:
    """A workload on a device, with its plan of waves."""

    def __init__(self, build: Workload, samples: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model, batch = build(samples)
        self.samples, self.device = samples, device
        self.on = "1xh200" if device.type == "cuda" else "1xcpu-core"
        self.batch = {name: rows.to(device) for name, rows in batch.items()}
        update = planned_update(adamw(self.model), self.model)
        graph = capture_sizes(self.model, batch, optimizer=update, device=device.type)
        recipe = TraceOptions(loss=None, update=update, device=device.type, name="waves")
        (kind,) = find_cluster(self.on).kinds
        found: list[Any] = []
        for size in (samples, samples // 2):
            part = {name: rows[:size] for name, rows in self.batch.items()}
            recorded, program = recipe.trace(self.fresh(), part, "train")
            known = merge_profiles(found) if found else None
            found.append(profile_program(recorded, program, kind, device=device.type,
                                         budget_s=_PROFILE_S, known=known))  # fmt: skip
        problem = make_problem(graph, self.on, profile=merge_profiles(found))
        launches = "replayed" if device.type == "cuda" else "eager"
        self.fit: WaveFit = waves_of(problem, launches=launches).fit  # type: ignore[arg-type]

    def fresh(self) -> nn.Module:
        """The model with its first weights."""
        return copy.deepcopy(self.model).to(self.device)

    def prepared(self, **options: Any) -> Callable[[], Any]:
        """All samples at once by ``hocket.prepare``."""
        model = self.fresh()
        train = prepare(model, adamw(model), self.batch, on=self.on, **options)
        return lambda: train.step(self.batch)

    def planned(self, plan: Plan) -> Callable[[], Any]:
        """A step of a plan with waves."""
        saved = SavedPlan(self.fit.problem, plan)
        synthetic = SyntheticModel(self.fresh(), lambda step: self.batch)
        train = SyntheticTraining(saved, synthetic, self.device).loop
        return lambda: train.step(self.batch)

    def rows(self) -> dict[str, tuple[Callable[[], Callable[[], Any]], WaveCandidate]]:
        """Systems by name: how to make a step, and what was predicted."""
        fit = self.fit
        plan = fit.plan_of(fit.shown)
        alone = plan.having(Waves(lead=len(pass_order(fit.problem.graph))))
        return {
            "whole batch": (self.prepared, fit.plain),
            "halves in turn": (lambda: self.planned(alone), fit.accumulated),
            "two waves": (lambda: self.planned(plan), fit.shown),
            "compiled": (lambda: self.prepared(compiled=True), fit.plain),
        }


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds of a step after eight others, the best of three runs."""
    for _ in range(8):
        step()
    best = float("inf")
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / steps)
    return best


def reserved_bytes() -> int:
    """Memory that the caching allocator holds after what is unused was given back."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def main() -> None:
    """Print a table of all workloads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--systems", default="")
    options = parser.parse_args()
    device = torch.device("cpu" if options.toy else "cuda")
    print("| workload | system | samples/s | predicted | memory | predicted |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only not in name:
            continue
        case = Case(build, samples, device)
        for label, (make, predicted) in case.rows().items():
            if options.systems and label not in options.systems.split(","):
                continue
            torch.manual_seed(1)
            before = reserved_bytes()
            try:
                step = make()
                seconds = timed(step, options.steps, device)
            except Exception as error:
                print(f"| {name} | {label} | {str(error)[:60]!r} | | | |", flush=True)
                continue
            memory = reserved_bytes() - before
            print(
                f"| {name} | {label} | {samples / seconds:,.0f} | {predicted.samples_per_s:,.0f} "
                f"| {format_bytes(memory)} | {format_bytes(predicted.peak_bytes)} |", flush=True,
            )  # fmt: skip
            del step


if __name__ == "__main__":
    main()
