"""A run from beginning to end: rebuild the model, split it, carry out the steps, compare."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from hocket.base.errors import UsageError
from hocket.cost.roofline import costs_from_settings
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import raise_violations, structure_violations
from hocket.runtime.rebuild import ModelSource, Rebuilt, rebuild
from hocket.runtime.record import StepRecord, measured_timeline
from hocket.runtime.room import require_room
from hocket.runtime.setup import Setup
from hocket.runtime.single import SingleProcess
from hocket.runtime.spawn import RankOptions, run_ranks
from hocket.runtime.split import split
from hocket.simulate import Timeline, simulate
from hocket.simulate.engine import instructions_of
from hocket.simulate.verify import update_violations

BackendChoice = Literal["auto", "single", "gloo", "nccl"]
BACKENDS: tuple[BackendChoice, ...] = ("auto", "single", "gloo", "nccl")
_NUM_KEPT = 8
"""Last steps of which the one in the middle is shown."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a plan is carried out."""

    steps: int = 1
    backend: BackendChoice = "auto"
    seed: int = 0
    threads: int | None = None
    """Threads of each process on processors; None shares the cores among them."""
    slowdown: Mapping[str, float] = field(default_factory=dict)
    """By device: how many times as long its ops take; a testing aid for `gloo`."""
    model: str | None = None
    scale: float = 1.0
    """Part of the planned batch that each step takes: what is placed where stays the same."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunResult:
    """What happened, beside what was predicted."""

    backend: str
    runs_on: Mapping[str, str]
    """By device of the plan: what it was carried out on."""
    losses: tuple[float | None, ...]
    """Of every step; None in inference."""
    step_s: tuple[float, ...]
    predicted: Timeline
    measured: Timeline
    """The step that took the middle time of the last ones."""

    @property
    def median_step_s(self) -> float:
        """Middle time of all steps but the first, which warms up, where there are more."""
        return statistics.median(self.step_s[1:] or self.step_s)

    @property
    def is_finite(self) -> bool:
        """Whether every loss is a number."""
        return all(loss is None or math.isfinite(loss) for loss in self.losses)


OnStep = Callable[[int, StepRecord], None]
OnStart = Callable[[list[int]], None]
OnProgress = Callable[[str], None]


def run_plan(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    *,
    source: ModelSource | None = None,
    on_start: OnStart = lambda process_ids: None,
    on_step: OnStep = lambda number, record: None,
    on_progress: OnProgress = lambda what: None,
) -> RunResult:
    """Carry out a plan for some steps; ``on_step`` is told each one when it is done.

    ``on_start`` is told the process ids of the ranks, where there are any, ``on_progress`` what is
    being done. ``source`` is the planned model where it is at hand.
    """
    if not 0 < options.scale <= 1:
        raise UsageError(
            f"--scale {options.scale:g} is no part of the batch", hint="give one above 0, up to 1"
        )
    if plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    found = list(structure_violations(plan, problem))
    found += [] if found else update_violations(plan.device_of, problem)
    raise_violations(found, plan.planner)
    predicted = simulate(problem, plan)
    used = np.unique(plan.device_of).tolist() or [0]
    backend, places = choose_backend(options.backend, problem, used)
    _check_slowdown(options, problem, backend)
    num_processes = 1 + (len(used) if backend != "single" else 0)
    if options.scale == 1:
        # Before the model takes memory itself; a smaller batch is known only once it is captured.
        require_room(problem, predicted, places, num_processes=num_processes)
    on_progress(f"building {problem.graph.name}")
    rebuilt = rebuild(
        problem.graph, model=options.model, source=source, seed=options.seed, scale=options.scale
    )
    if options.scale < 1:
        problem = _of_graph(problem, rebuilt.graph)
        predicted = simulate(problem, plan)
        require_room(problem, predicted, places, num_processes=num_processes)
    tables = instructions_of(problem, plan)
    parts = split(problem.graph, tables, timeline=predicted, order=plan.order)
    setup = Setup(problem.graph, rebuilt.program, plan.device_of, parts)
    seen: list[StepRecord] = []
    losses: list[float | None] = []
    step_s: list[float] = []

    def note(number: int, record: StepRecord) -> None:
        losses.append(record.loss)
        step_s.append(record.step_s)
        seen.append(record)
        del seen[:-_NUM_KEPT]
        on_step(number, record)

    if backend == "single":
        _run_single(setup, rebuilt, places, options, note, on_progress)
    else:
        _run_in_ranks(problem, setup, rebuilt, backend, options, on_start, note, on_progress)
    middle = sorted(seen, key=lambda record: record.step_s)[len(seen) // 2]
    names = problem.cluster.device_names
    return RunResult(
        backend=backend,
        runs_on={names[device]: places[device] for device in parts.used_devices},
        losses=tuple(losses),
        step_s=tuple(step_s),
        predicted=predicted,
        measured=measured_timeline(middle, plan.device_of, parts.transfers, len(names)),
    )


def choose_backend(
    wanted: BackendChoice, problem: Problem, used: Sequence[int]
) -> tuple[str, dict[int, str]]:
    """The backend, and what each used device of the plan is carried out on."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = problem.cluster.devices
    accelerators = [device for device in used if not devices[device].kind.is_cpu]
    if wanted == "nccl" and (num_gpus < len(used) or len(accelerators) < len(used)):
        raise UsageError(
            f"backend 'nccl' needs accelerators only and a CUDA device for each: the plan uses "
            f"{len(accelerators)} accelerators and {len(used) - len(accelerators)} processors, "
            f"this machine has {num_gpus} CUDA devices",
            hint="use --backend gloo for processes on the processor, or single",
        )
    if wanted == "auto":
        has_room = bool(accelerators) and len(accelerators) <= num_gpus
        wanted = "single" if has_room or len(used) == 1 else "gloo"
    if wanted == "gloo":
        return wanted, dict.fromkeys(used, "cpu")
    if wanted == "nccl":
        return wanted, {device: f"cuda:{rank}" for rank, device in enumerate(used)}
    places = dict.fromkeys(used, "cpu")
    if num_gpus:
        places |= {d: f"cuda:{index % num_gpus}" for index, d in enumerate(accelerators)}
    return wanted, places


def _run_single(
    setup: Setup, rebuilt: Rebuilt, places: Mapping[int, str], options: RunOptions, note: OnStep,
    on_progress: OnProgress,
) -> None:  # fmt: skip
    devices = [torch.device(places.get(d, "cpu")) for d in range(setup.split.num_devices)]
    before = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        process = SingleProcess(setup, rebuilt.values, devices, seed=options.seed)
        for number in range(1, options.steps + 1):
            on_progress(f"step {number} of {options.steps}")
            note(number, process.step(number))
    finally:
        torch.set_num_threads(before)


def _run_in_ranks(
    problem: Problem,
    setup: Setup,
    rebuilt: Rebuilt,
    backend: str,
    options: RunOptions,
    on_start: OnStart,
    note: OnStep,
    on_progress: OnProgress,
) -> None:
    names = problem.cluster.device_names
    num_ranks = len(setup.split.used_devices)
    run_ranks(
        setup,
        rebuilt.values,
        names,
        RankOptions(
            backend="nccl" if backend == "nccl" else "gloo",
            steps=options.steps,
            seed=options.seed,
            threads=options.threads or max(1, (os.cpu_count() or 1) // num_ranks),
            slowdown={names.index(name): factor for name, factor in options.slowdown.items()},
        ),
        on_start=on_start,
        on_step=note,
        on_progress=on_progress,
    )


def _of_graph(problem: Problem, graph: Graph) -> Problem:
    """The same problem with another graph of the same ops."""
    costs = costs_from_settings(graph, problem.cluster, problem.costs.settings)
    return replace(problem, graph=graph, costs=costs)


def _check_slowdown(options: RunOptions, problem: Problem, backend: str) -> None:
    if not options.slowdown:
        return
    for name, factor in options.slowdown.items():
        if name not in problem.cluster.device_names:
            raise UsageError(
                f"--slowdown names {name!r}, which the plan's cluster does not have",
                hint=f"it has {', '.join(problem.cluster.device_names)}",
            )
        if not 1.0 <= factor < math.inf:
            raise UsageError(f"--slowdown {name}={factor:g}: a device can only become slower",
                             hint="give a factor of 1 or more")  # fmt: skip
    if backend != "gloo":
        raise UsageError("--slowdown works with processes only", hint="add --backend gloo")
