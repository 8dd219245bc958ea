"""Two waves on one GPU beside eager, compiled and captured steps, and a larger batch.

    PYTHONPATH=src python benchmarks/waves/h200.py [--cap 8] [--only TEXT] [--steps 50]
    PYTHONPATH=src python benchmarks/waves/h200.py --toy      # on a processor, small

Every workload under one cap of memory, predicted from the times of its single ops: the whole batch,
one lane and two lanes of ours, replayed as one CUDA graph, eager, and twice the batch at once. Two
lanes run as planned (in memory of each lane's own where there is room), in one memory of both,
without any wait between lanes (which is wrong, and tells what waits cost), and with at most 1.25
times the memory of one wave. Rows have samples per second, the share of time in which kernels run,
the peak beside the planned one, and predicted against measured. Losses of two lanes beside
accumulation over 100 steps with deterministic kernels: the same bits. A system that fails says why
in its row. `all_rows.py` runs all workloads, `compiled_lanes.py` has the compiled systems,
`pairs.py` pairs of kernels.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from table import ROWS
from timing import GIB, LOSSES_S, Turns, at_most, keep_cap, options_of, parsed, row_of
from torch import nn
from workloads import TOYS, WORKLOADS, Workload, adamw, plain_step

from hocket.api import make_problem
from hocket.api.planned import find_cluster
from hocket.api.waves import waves_of
from hocket.capture.loss import ChosenLoss
from hocket.capture.perform import draw_seed
from hocket.capture.program import Program
from hocket.capture.sizes import capture_sizes
from hocket.cost.measure import TWO_STEPS, profile_program
from hocket.cost.profile import Profile, merge_profiles
from hocket.cost.roofline import Launches
from hocket.graph.graph import Graph
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import WaveFit
from hocket.planners.waves.way import WaveWay, placed
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.synthetic import SyntheticTraining
from hocket.runtime.train import replayed_waves as lane_notes
from hocket.runtime.train.planned_optimizer import planned_update
from hocket.runtime.train.replayed_waves import ReplayedWaves
from hocket.runtime.train.trace_options import Kind, Recipe
from hocket.runtime.train.waves import WaveWarning
from hocket.training import prepare

_PROFILE_S = 4.0
"""For the ops of one size of batch."""


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

    def __init__(self, build: Workload, samples: int, device: torch.device, cap: int) -> None:
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
        self._graph, self._cap = graph, cap
        self._plan(None)
        # Both sizes are recorded before anybody waits for the GPU.
        self._recorded = [
            self.recipe.trace(
                self.fresh(), {name: rows[:size] for name, rows in self.batch.items()}, "train"
            )
            for size in (samples, samples // 2)
        ]

    def _plan(self, profile: Profile | None) -> None:
        """Waves by the times of single ops, or by rates of the data sheet."""
        problem = make_problem(self._graph, self.on, profile=profile)
        launches: Launches = "replayed" if self.device.type == "cuda" else "eager"
        self.outlook = waves_of(problem, memory_bytes=self._cap, launches=launches)

    def price(self, turns: Turns) -> None:
        """Plan again with the times of all ops of the whole batch and of one wave."""
        (kind,) = find_cluster(self.on).kinds
        found = []
        with turns.turn():
            for graph, program in self._recorded:
                known = merge_profiles(found) if found else None
                found.append(profile_program(graph, program, kind, device=self.device.type,
                                             budget_s=_PROFILE_S, known=known))  # fmt: skip
        self.profile = merge_profiles(found)
        with turns.beside():
            self._plan(self.profile)

    def tell(self) -> str:
        """What the last system said of itself, once."""
        told, self.told = self.told, ""
        return told

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

    def unbound(self, plan: Plan, fit: WaveFit) -> Callable[[], Any]:
        """Two lanes that wait for nothing: numbers may be wrong, and only times are of use."""
        step = self.ours(plan, fit)

        def free() -> Any:
            with patch.object(lane_notes, "lane_edges", lambda *_: []):
                return step()

        return free

    def ours(self, plan: Plan, fit: WaveFit) -> Callable[[], Any]:
        """A step in one lane or two."""
        model = self.fresh()
        train = SyntheticTraining(
            SavedPlan(fit.problem, plan), model, lambda step: self.batch, self.device
        ).loop
        waves = train._strategy._waves

        def step() -> Any:
            found = train.step(self.batch)
            if isinstance(waves, ReplayedWaves):
                notes = waves.notes
                said = f"{notes.num_waits} waits of {len(notes.lane)} calls"
                # Nothing is noted of waves that ran in no lanes.
                self.told = waves.repeats.refusal or (said if notes.lane else "not in lanes")
            return found

        return step


def systems(case: Case) -> dict[str, System]:
    """Ways to train, by name, the most telling first; made when they are measured."""
    fit = case.outlook.fit
    quick, thin, mixed = quickest(fit), lean(fit), shared(fit)
    found = {
        "two lanes": System(lambda: case.ours(fit.plan_of(quick), fit), quick),
        "whole batch, replayed": System(case.whole, fit.plain),
        "two lanes, shared memory": System(lambda: case.ours(fit.plan_of(mixed), fit), mixed),
        "two lanes, no waits": System(lambda: case.unbound(fit.plan_of(quick), fit), quick),
        "two lanes, lean": System(lambda: case.ours(fit.plan_of(thin), fit), thin),
        "one lane, replayed": System(lambda: case.ours(one_lane(fit), fit), fit.accumulated),
    }
    if thin is mixed:
        del found["two lanes, lean"]
    if quick is mixed:
        # In one memory kernels that count in it could wait for ever for what another overwrote.
        del found["two lanes, shared memory"], found["two lanes, no waits"]
    return found


def quickest(fit: WaveFit) -> WaveWay:
    """Two lanes as they are planned, also where they do not pay."""
    return fit.chosen or fit.leanest


def shared(fit: WaveFit) -> WaveWay:
    """The same start, with one memory for both lanes."""
    way = quickest(fit)
    assert way.lanes is not None
    if not way.lanes.own_bytes:
        return way
    lead, waits = way.lanes.lead, way.lanes.waits
    start = next(w for w in fit.tried if w.lanes.lead == lead and {*w.lanes.waits} <= {*waits})
    return placed(fit.problem, start)


def lean(fit: WaveFit) -> WaveWay:
    """The quickest two lanes that hold little more than one wave."""
    return fit.lean or fit.leanest


def one_lane(fit: WaveFit) -> Plan:
    """The same microbatches, the second wave after the first."""
    passes = int((fit.problem.graph.op_phase != 2).sum())
    return fit.plan_of(quickest(fit)).having(Lanes(lead=passes))


def rows(name: str, case: Case, steps: int, turns: Turns, wanted: list[str]) -> None:
    """A line per system."""
    for label, system in systems(case).items():
        if any(part in label for part in wanted):
            row_of(turns, name, label, system.make, case.samples, case.device, steps,
                   planned_of(system.way), told=case.tell)  # fmt: skip


def planned_of(way: WaveWay) -> tuple[float, int]:
    """What was predicted of it."""
    return way.samples_per_s, way.peak_bytes


def rows_told(profile: Profile) -> dict[str, Any]:
    """How many times as long a step takes beside a second one: whole batches and waves."""
    known = {e.replayed.beside for e in profile.entries if e.replayed and e.replayed.beside}
    return {"of_one": " ".join(f"{times:.3f}" for times in sorted(known)),
            "missing": profile.missing.get(TWO_STEPS, "")}  # fmt: skip


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def deterministic(*, strict: bool) -> Iterator[None]:
    """Kernels whose sums have one order. Attention is among them only where others are not allowed:
    with warnings alone PyTorch keeps the quicker kernel that goes back in any order."""
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def accumulated(case: Case, sizes: tuple[int, ...]) -> Callable[[], Any]:
    """Plain PyTorch: one microbatch after the other, then the update."""
    model, loss_of = case.fresh(), ChosenLoss(None)
    optimizer = adamw(model)
    parts, shares = microbatches(case.batch, sizes, None)

    def step() -> torch.Tensor:
        found = []
        for part, share in zip(parts, shares, strict=True):
            loss = loss_of(model(**part))
            (loss * share).backward()
            found.append(loss.detach() * share)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(found).sum(0)

    return step


def losses_of(make: Callable[[], Callable[[], Any]], steps: int) -> list[float]:
    """Of some steps, each with a seed of its own."""
    step, found = make(), []
    for number in range(1, steps + 1):
        torch.manual_seed(draw_seed(0, number, 0))
        found.append(step())
    return [float(loss) for loss in found]


def bits(name: str, case: Case, steps: int, turns: Turns) -> None:
    """Steps whose loss in two lanes is the same bits as one after the other, and as in PyTorch.

    Nobody times anything meanwhile.
    """
    fit = case.outlook.fit
    chosen = {"two lanes": quickest(fit), "shared memory": shared(fit), "lean": lean(fit)}
    ways = {label: fit.plan_of(way) for label, way in chosen.items()}
    for label, before in (("shared memory", "two lanes"), ("lean", "shared memory")):
        if chosen[label] is chosen[before]:
            del ways[label]
    makes = {"one lane": lambda: case.ours(one_lane(fit), fit)}
    makes |= {label: partial(case.ours, plan, fit) for label, plan in ways.items()}
    sizes = fit.accumulated.shares.replicas[0].microbatches
    makes["plain PyTorch"] = lambda: accumulated(case, sizes)
    found: dict[str, list[float]] = {}
    for label, make in makes.items():
        for strict in (True, False):
            kind = "" if strict else ", some kernels not deterministic"
            try:
                with turns.beside(), deterministic(strict=strict), at_most(LOSSES_S):
                    found[label] = losses_of(make, steps)
            # Losses of the others are worth knowing.
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {str(error)[:200]}"
                turns.write(name, f"losses, {label}{kind}", failed=text)
                continue
            first = next(iter(found.values()))
            same = sum(a == b for a, b in zip(first, found[label], strict=True))
            turns.write(name, f"losses, {label}{kind}", last=found[label][-1],
                        same_as_one_lane=f"{same} of {steps}", told=case.tell())  # fmt: skip
            break


# ── one workload ─────────────────────────────────────────────────────────────────────────────────


def larger(build: Workload, samples: int, device: torch.device) -> Callable[[], Any]:
    """A step of plain PyTorch with more samples."""
    torch.manual_seed(0)
    model, batch = build(samples)
    return plain_step(model.to(device), {n: rows.to(device) for n, rows in batch.items()})


def compare(name: str, build: Workload, samples: int, options: argparse.Namespace) -> None:
    """All rows of a workload."""
    device = torch.device("cpu" if options.toy else "cuda")
    turns = Turns(options.turns, options.until)
    case = Case(build, samples, device, int(options.cap * GIB))
    if options.losses:
        bits(name, case, options.losses, turns)
    turns.prepared()
    case.price(turns)
    turns.write(name, ROWS, **rows_told(case.profile))
    fit = case.outlook.fit
    for label, way in (
        ("planned", quickest(fit)),
        ("planned, shared memory", shared(fit)),
        ("planned, lean", lean(fit)),
    ):
        turns.write(
            name, label, predicted=way.samples_per_s, gain=fit.gain or math.inf,
            planned_gib=way.peak_bytes / GIB, one_wave=way.peak_bytes / fit.one_wave_bytes,
            lead=way.lanes.lead, waits=way.num_waits,
            slab_gib=sum(fit.plan_of(way)[Lanes].slabs) / GIB,
        )  # fmt: skip
    wanted = options.systems.split(";")
    rows(name, case, options.steps, turns, wanted)
    asked = case.outlook.other or fit
    plain: dict[str, tuple[Any, int, Any]] = {
        "eager": (case.plain, samples, planned_of(asked.plain)),
        "eager, twice the batch": (lambda: larger(build, 2 * samples, device), 2 * samples, None),
    }
    for label, (make, count, planned) in plain.items():
        if any(part in label for part in wanted):
            row_of(turns, name, label, make, count, device, options.steps, planned)


def main() -> int:
    """All tables."""
    parser = options_of(__doc__.splitlines()[0])
    parser.add_argument("--losses", type=int, default=100, help="steps whose losses are compared")
    options = parsed(parser)
    warnings.simplefilter("always", WaveWarning)
    keep_cap(options)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only in name:
            compare(name, build, samples, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
