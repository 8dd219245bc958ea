"""``hocket run``: `choose_strategy` and a loop over synthetic batches, beside the prediction.

The model is built again, with random weights, in this process or in one per device of the plan; the
strategies are those of `hocket.prepare`. A process that dies, stops or fails is named in a
`RunError`, and however a run ends, no process, file or port that it made is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from hocket.base.errors import UsageError, unknown_name
from hocket.capture.optimizer import required_optimizer
from hocket.cost.costs import TimeSource
from hocket.hardware.cluster import Device
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Memory, Parallel, Replica, Waves
from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan
from hocket.plan.verify import raise_violations, require_structure, structure_violations
from hocket.processes.heartbeat import Position, how_far
from hocket.runtime.launch import used_devices
from hocket.runtime.numerics_check import Agreement, check_parallel
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.planned_model import BuiltModel, ModelSource, build
from hocket.runtime.process_settings import torch_threads
from hocket.runtime.run_limits import require_memory_for_states, require_memory_here
from hocket.runtime.run_options import (
    BACKENDS,
    KIND_NAMES,
    RunCallbacks,
    RunOptions,
    RunResult,
    middle_step,
)
from hocket.runtime.run_ranks import run_ranks
from hocket.runtime.scaled_batch import smaller_batch, with_graph
from hocket.runtime.step_record import StepRecord, measured_timeline
from hocket.runtime.strategies.parallel import refuse_degrees
from hocket.runtime.strategies.placed import places_in_process
from hocket.runtime.strategy import claimed_step_s
from hocket.runtime.synthetic_training import PER_STEP, SyntheticTraining
from hocket.runtime.transformer_refusals import TRAINED_DTYPES, refuse_plan
from hocket.simulate import Timeline, simulate
from hocket.simulate.verify import update_violations

Kind = Literal["placement", "transformer", "shares", "budget", "waves"]
"""By what a plan decides."""
_NUM_KEPT = 8
"""Last steps of which the one in the middle is shown."""
WALK_S = 9.3e-6
"""Overhead of a traced step per op on a CPU: it looks tensors up, counts bytes and notes times in
Python, between two ops. ``benchmarks/runtime/walk.py`` on an AMD EPYC, Python
3.11: a view takes 9.5 us and 4.5 more until the next op begins, where eager dispatch was measured
as 4.7; the shortest of 35 steps, op by op, so that other programs do not count."""


def with_walk(problem: Problem, places: Mapping[int, str]) -> Problem:
    """Return the problem with the times of a run on ``places``; stated times stay as they are."""
    costs, devices = problem.costs, problem.cluster.devices
    rows = {
        int(costs.device_row[device])
        for device, place in places.items()
        if place == "cpu" and devices[device].kind.is_cpu
    }
    op_s = costs.op_s.copy()
    for row in rows:
        op_s[row] += WALK_S * (costs.op_source[row] != TimeSource.FILE)
    return replace(problem, op_costs=replace(costs, op_s=op_s))


def kind_of(plan: Plan) -> Kind:
    """Name what a plan decides, as options and messages name it."""
    if plan.get(Waves) is not None:
        return "waves"
    if plan.get(Parallel) is not None:
        return "transformer" if is_transformer_plan(plan) else "shares"
    return "placement" if plan.get(Memory) is None else "budget"


@dataclass(frozen=True, eq=False, kw_only=True)
class _Run:
    """A plan that is to run; once it is ready, with its model and where it runs."""

    kind: Kind
    problem: Problem
    plan: Plan
    options: RunOptions
    source: ModelSource | None
    watch: RunCallbacks
    backend: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    """By device of the plan, in the order of ranks: what it runs on here."""
    predicted: Timeline | None = None
    predicted_step_s: float | None = None
    """Where it is another than that of the timeline."""
    built: BuiltModel | None = None
    """None for plans of a transformer's shape, whose ranks build the model of that shape."""
    dtype: str | None = None
    agreement: Agreement | None = None

    def chosen(self) -> _Run:
        """Choose the backend, and what each used device of the plan runs on."""
        names = used_devices(self.problem, self.plan)
        found = {device.name: device for device in self.problem.cluster.devices}
        has_source, wanted = self.source is not None, self.options.backend
        if has_source and wanted == "auto":
            wanted = "single"
        backend, places = choose_backend(self.kind, wanted, [found[name] for name in names])
        if has_source and backend != "single":
            raise UsageError(
                "a model that is only in this program cannot be built by other processes",
                hint="run it with backend='single', or name a function that builds it",
            )
        return replace(self, backend=backend, places=dict(zip(names, places, strict=True)))

    def with_model(self, *, scale: float = 1.0, is_scaled: bool = False) -> _Run:
        """Build the planned model again."""
        graph, options = self.problem.graph, self.options
        self.watch.on_progress(f"building {graph.name}")
        return replace(self, built=build(
            graph, model=options.model, source=self.source, seed=options.seed, scale=scale,
            is_scaled=is_scaled,
        ))  # fmt: skip

    def require_memory(self, predicted: Timeline | None) -> None:
        """Refuse a run whose predicted peaks are more than is free here."""
        assert predicted is not None, "it was simulated"
        names = self.problem.cluster.device_names
        num_ranks = 0 if self.backend == "single" else len(self.places)
        require_memory_here(
            self.problem, predicted, {names.index(n): place for n, place in self.places.items()},
            num_processes=1 + num_ranks,
        )  # fmt: skip


@dataclass(eq=False)
class _Steps:
    """Steps that have run so far."""

    watch: RunCallbacks
    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    kept: list[tuple[StepRecord, Timeline | None]] = field(default_factory=list)
    """The last ones."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """By device of the plan, the most of all steps."""

    def add(self, number: int, record: StepRecord, measured: Timeline | None = None) -> None:
        """Note a step that is done."""
        self.losses.append(record.loss)
        self.step_s.append(record.step_s)
        self.kept.append((record, measured))
        del self.kept[:-_NUM_KEPT]
        for device, peak in record.peak_bytes.items():
            self.peak_bytes[device] = max(peak, self.peak_bytes.get(device, 0))
        self.watch.on_step(number, record)

    def middle(self) -> tuple[StepRecord, Timeline | None]:
        """Return the representative step."""
        found = middle_step([record for record, _ in self.kept], self.step_s)
        return next(pair for pair in self.kept if pair[0] is found)


def run_plan(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    *,
    source: ModelSource | None = None,
    watch: RunCallbacks = RunCallbacks(),  # noqa: B008 - frozen
) -> RunResult:
    """Run a plan for some steps; ``source`` is the planned model where it is at hand."""
    kind = kind_of(plan)
    options.require_meaning(kind)
    run = _READY[kind](
        _Run(kind=kind, problem=problem, plan=plan, options=options, source=source, watch=watch)
    )
    steps, transfers = _Steps(watch), None
    if run.backend == "single":
        _train_here(run, steps)
    else:
        report = run_ranks(
            SavedPlan(run.problem, run.plan), run.places, _given(run), options, run.backend,
            replace(watch, on_step=steps.add),
        )  # fmt: skip
        transfers = report.transfers
    record, measured = steps.middle()
    names, predicted = run.problem.cluster.device_names, run.predicted
    assert predicted is not None, "it is ready"
    if transfers is not None and record.op_start_s and run.plan.device_of is not None:
        measured = measured_timeline(record, run.plan.device_of, transfers, len(names))
    is_scaled = kind == "shares" and options.scale < 1
    return RunResult(
        backend=run.backend,
        runs_on=dict(run.places),
        losses=tuple(steps.losses),
        step_s=tuple(steps.step_s),
        predicted_step_s=run.predicted_step_s or predicted.makespan_s,
        predicted=predicted,
        measured=measured,
        peak_bytes={names[device]: peak for device, peak in steps.peak_bytes.items()},
        executed=(run.problem, run.plan) if is_scaled else None,
        dtype=run.dtype,
        agreement=run.agreement,
    )


def choose_backend(kind: Kind, wanted: str, devices: Sequence[Device]) -> tuple[str, list[str]]:
    """Return how a plan that uses these devices runs here, and the real device of each.

    Raises `UsageError` where this machine cannot.
    """
    known: tuple[str, ...] = (
        ("gloo", "nccl") if kind == "transformer" else ("single", "gloo", "nccl")
    )
    known = ("single",) if kind in ("budget", "waves") else known
    gpus = torch.cuda.device_count()
    if wanted == "auto":
        wanted = _suited(kind, devices, gpus)
    if wanted not in known:
        if wanted in BACKENDS:
            raise UsageError(
                f"backend {wanted!r} does not run {KIND_NAMES[kind]}",
                hint=f"use one of {', '.join(('auto', *known))}",
            )
        raise unknown_name("backend", wanted, BACKENDS)
    if wanted == "single" and kind == "placement":
        return wanted, places_in_process(devices)
    if wanted == "single":
        return wanted, ["cuda:0" if gpus else "cpu"] * len(devices)
    if wanted == "gloo":
        return wanted, ["cpu"] * len(devices)
    num_cpus = sum(device.kind.is_cpu for device in devices) if kind == "placement" else 0
    if gpus < len(devices) or num_cpus:
        raise UsageError(
            f"backend 'nccl' needs accelerators only and a CUDA device for each: the plan uses "
            f"{len(devices) - num_cpus} accelerators and {num_cpus} CPUs, this machine has "
            f"{gpus} CUDA devices",
            hint="use --backend gloo for processes on the CPU, or export the plan and start "
            "it with torchrun on several machines",
        )
    return wanted, [f"cuda:{rank}" for rank in range(len(devices))]


def _suited(kind: Kind, devices: Sequence[Device], gpus: int) -> str:
    """Return the natural backend of a plan on this machine."""
    if kind in ("budget", "waves") or (len(devices) == 1 and kind != "transformer"):
        return "single"
    if kind == "placement":
        num_accelerators = sum(not device.kind.is_cpu for device in devices)
        return "single" if 0 < num_accelerators <= gpus else "gloo"
    return "nccl" if len(devices) <= gpus else "gloo"


# ── plans made ready ─────────────────────────────────────────────────────────────────────────────


def _placement(run: _Run) -> _Run:
    problem, plan, scale = run.problem, run.plan, run.options.scale
    if plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    found = list(structure_violations(plan, problem))
    found += [] if found else update_violations(plan.device_of, problem)
    raise_violations(found, plan.planner)
    run = run.chosen()
    indices = {problem.cluster.device_names.index(n): place for n, place in run.places.items()}
    _require_slowdowns(run.options, problem, run.backend)
    problem = with_walk(problem, indices)
    run = replace(run, problem=problem, predicted=simulate(problem, plan))
    if scale == 1:
        # Before the model takes memory itself; a smaller batch is known only once it is captured.
        run.require_memory(run.predicted)
    run = run.with_model(scale=scale)
    if scale == 1:
        return run
    assert run.built is not None
    problem = with_walk(with_graph(problem, run.built.graph), indices)
    plan = replace(plan, work_hash=problem.work_hash)
    run = replace(run, problem=problem, plan=plan, predicted=simulate(problem, plan))
    run.require_memory(run.predicted)
    return run


def _require_slowdowns(options: RunOptions, problem: Problem, backend: str) -> None:
    """Refuse slowdowns of unknown devices, below one, or without processes."""
    for name, factor in options.slowdown.items():
        if name not in problem.cluster.device_names:
            raise UsageError(
                f"--slowdown names {name!r}, which the plan's cluster does not have",
                hint=f"it has {', '.join(problem.cluster.device_names)}",
            )
        if not 1.0 <= factor < math.inf:
            raise UsageError(
                f"--slowdown {name}={factor:g}: a device can only become slower",
                hint="give a factor of 1 or more",
            )
        if backend != "gloo":
            raise UsageError("--slowdown works with processes only", hint="add --backend gloo")


def _split_batch(run: _Run) -> _Run:
    problem, plan, scale = run.problem, run.plan, run.options.scale
    require_structure(plan, problem)
    if scale < 1:
        problem, parallel = smaller_batch(problem, plan[Parallel], scale)
        plan = plan.having(parallel)
    # Gloo and NCCL sum gradients as they do, whatever the plan says of its links.
    plan = plan.without(Communication)
    run = replace(run, problem=problem, plan=plan, predicted=simulate(problem, plan)).chosen()
    is_single = run.backend == "single"
    run.require_memory(simulate(problem, _on_one_device(plan)) if is_single else run.predicted)
    run = run.with_model(is_scaled=scale < 1)
    required_optimizer(problem.graph.meta)
    return run


def _transformer(run: _Run) -> _Run:
    """Make a plan of a transformer's shape ready, which trains the built-in model of that shape."""
    planned = TransformerPlan(run.problem, run.plan)
    refuse_plan(planned)
    refuse_degrees(planned.config)
    run = run.chosen()
    is_trained = planned.dtype in TRAINED_DTYPES
    usual = planned.dtype if is_trained else TRAINED_DTYPES[0]
    dtype = run.options.dtype or ("float32" if run.backend == "gloo" else usual)
    if run.backend == "gloo":
        require_memory_for_states(planned, getattr(torch, dtype))
    agreement = None
    if run.options.checks:
        run.watch.on_progress("checking numerics at small size")
        agreement = check_parallel(planned)
    run.watch.on_progress(f"building {planned.model.name}")
    predicted = simulate(run.problem, run.plan)
    return replace(
        run, predicted=predicted, predicted_step_s=planned.step_s, dtype=dtype, agreement=agreement
    )


def _one_device(run: _Run) -> _Run:
    """Make a memory plan or waves ready, both of one device."""
    problem, plan = run.problem, run.plan
    require_structure(plan, problem)
    if len(used_devices(problem, plan)) > 1:
        raise UsageError(
            f"{'waves' if run.kind == 'waves' else 'a memory plan'} of several devices takes a "
            "process for each",
            hint="hocket launch runs it in your own loop; plan one device to run it here",
        )
    run = run.chosen()
    waves = plan.get(Waves)
    # A CPU has one allocator, so streams share what either of them frees.
    is_cpu = waves is not None and set(run.places.values()) == {"cpu"}
    held = plan.having(replace(waves, separate_bytes=0)) if waves is not None and is_cpu else plan
    run = run.with_model()
    required_optimizer(problem.graph.meta)
    run.watch.on_progress("tracing a step")
    step_s = claimed_step_s(problem, plan)
    return replace(run, predicted=simulate(problem, held), predicted_step_s=step_s)


_READY: Mapping[Kind, Callable[[_Run], _Run]] = {
    "placement": _placement, "shares": _split_batch, "transformer": _transformer,
    "budget": _one_device, "waves": _one_device,
}  # fmt: skip


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def _given(run: _Run) -> dict[str, Any]:
    """Describe the model that ranks build."""
    if run.built is None:
        return {"model": None, "dtype": run.dtype}
    loss = run.built.loss
    return {
        "model": run.built.name, "options": dict(run.built.options),
        "loss": loss if isinstance(loss, str) else None,
    }  # fmt: skip


def _train_here(run: _Run, steps: _Steps) -> None:
    """Train for all steps in this process."""
    options, built, is_placement = run.options, run.built, run.kind == "placement"
    assert built is not None
    plan = _on_one_device(run.plan) if run.kind == "shares" else run.plan
    place = next(iter(run.places.values()))
    is_counted = not is_placement and place == "cpu" and run.kind != "shares"

    def report(number: int, done: int) -> None:
        steps.watch.on_progress(how_far([Position(0.0, number, done)], [PER_STEP], options.steps))

    with torch_threads(options.threads), torch.random.fork_rng(), ExitStack() as counting:
        training = SyntheticTraining(
            SavedPlan(run.problem, plan), built.module, lambda number: built.batch,
            torch.device(place), loss=built.loss, seed=options.seed, name=built.name,
        )  # fmt: skip
        tracker = _counting(counting, training.lasting()) if is_counted else None
        for number in range(1, options.steps + 1):
            if number > _NUM_COUNTED:
                counting.close()
            record = training.step(number, report, timed=is_placement)
            timings = training.loop.timings
            if tracker is not None and number <= _NUM_COUNTED:
                record.peak_bytes[0] = tracker.peak_bytes
            elif tracker is None and run.kind in ("budget", "waves"):
                record.peak_bytes[0] = int(torch.cuda.max_memory_allocated())
            measured = None
            if is_placement and timings is not None:
                peak_bytes = timings.measured.peak_bytes.copy()
                for device, num_bytes in training.state_bytes().items():
                    peak_bytes[device] += num_bytes
                measured = replace(timings.measured, peak_bytes=peak_bytes)
            steps.add(number, record, measured)


_NUM_COUNTED = 3
"""Steps on a CPU whose bytes are counted storage by storage, which takes time. State that
is swapped in has its memory there from the backward pass of the second step on."""


def _counting(stack: ExitStack, lasting: Iterable[torch.Tensor]) -> MemoryTracker:
    """Count what is there before the first step and what steps make."""
    tracker = MemoryTracker()
    stack.enter_context(tracker)
    tracker.track(lasting)
    return tracker


def _on_one_device(plan: Plan) -> Plan:
    """Return the same microbatches, all on the first device."""
    replicas = plan[Parallel].replicas
    sizes = tuple(size for replica in replicas for size in replica.microbatches)
    only = Replica(devices=replicas[0].devices[:1], microbatches=sizes)
    return plan.having(Parallel(replicas=(only,)))
