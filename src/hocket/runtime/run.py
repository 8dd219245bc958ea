"""``hocket run``: train synthetic batches under a plan, and compare with the prediction.

The model is built anew with random weights, in this process or in one process per device of the
plan. The strategy is chosen as for `hocket.prepare`. The file chooses backend and real devices,
checks the plan and the free memory of this machine, runs the steps, and returns losses, step times,
peaks and the measured timeline. If a process dies, hangs or fails, a `RunError` names it. However
the run ends, its processes, files and ports are released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from hocket.base.errors import UsageError, unknown_name
from hocket.capture.optimizer import required_optimizer
from hocket.hardware.cluster import Device
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Memory, Parallel, Replica, Waves
from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan
from hocket.plan.verify import raise_violations, require_structure, structure_violations
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
from hocket.runtime.step_record import StepRecord, measured_timeline
from hocket.runtime.strategies.placed import places_in_process
from hocket.runtime.strategy import claimed_step_s
from hocket.runtime.synthetic_training import SyntheticModel, SyntheticTraining
from hocket.runtime.transformer_refusals import TRAINED_DTYPES, refuse_degrees, refuse_plan
from hocket.simulate import Timeline, simulate
from hocket.simulate.verify import update_violations

Kind = Literal["placement", "transformer", "shares", "budget", "waves"]
"""Type of a plan, by its main section."""
_NUM_KEPT = 8
"""Number of latest steps from which the step with the median time is shown."""


def kind_of(plan: Plan) -> Kind:
    """Return the type of a plan."""
    if plan.get(Waves) is not None:
        return "waves"
    if plan.get(Parallel) is not None:
        return "transformer" if is_transformer_plan(plan) else "shares"
    return "placement" if plan.get(Memory) is None else "budget"


@dataclass(frozen=True, eq=False, kw_only=True)
class _Run:
    """A plan to run; preparation adds the model and the real devices."""

    kind: Kind
    problem: Problem
    plan: Plan
    options: RunOptions
    source: ModelSource | None
    watch: RunCallbacks
    backend: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    """The real device of each device of the plan, in the order of ranks."""
    predicted: Timeline | None = None
    predicted_step_s: float | None = None
    """Predicted step time, if the timeline does not have it."""
    built: BuiltModel | None = None
    """None for plans of a transformer shape: each rank builds the built-in model."""
    dtype: str | None = None
    agreement: Agreement | None = None

    def chosen(self) -> _Run:
        """Choose the backend, and a real device for each used device of the plan."""
        names = used_devices(self.problem, self.plan)
        found = {device.name: device for device in self.problem.cluster.devices}
        has_source, wanted = self.source is not None, self.options.backend
        if has_source and wanted == "auto":
            wanted = "single"
        backend, places = choose_backend(self.kind, wanted, [found[name] for name in names])
        if has_source and backend != "single":
            raise UsageError(
                "other processes cannot build a model that exists in this program alone",
                hint="run it with backend='single', or name a function that builds it",
            )
        return replace(self, backend=backend, places=dict(zip(names, places, strict=True)))

    def with_model(self) -> _Run:
        """Build the planned model anew, with random weights."""
        graph, options = self.problem.graph, self.options
        self.watch.on_progress(f"building {graph.name}")
        return replace(
            self, built=build(graph, model=options.model, source=self.source, seed=options.seed)
        )

    def require_memory(self, predicted: Timeline) -> None:
        """Refuse a run whose predicted peaks are more than the free memory of this machine."""
        names = self.problem.cluster.device_names
        num_ranks = 0 if self.backend == "single" else len(self.places)
        require_memory_here(
            self.problem, predicted, {names.index(n): place for n, place in self.places.items()},
            num_processes=1 + num_ranks,
        )  # fmt: skip


@dataclass(eq=False)
class _Steps:
    """Results of the steps that have run so far."""

    watch: RunCallbacks
    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    kept: list[tuple[StepRecord, Timeline | None]] = field(default_factory=list)
    """The latest steps."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Largest peak of all steps, by device of the plan."""

    def add(self, number: int, record: StepRecord, measured: Timeline | None = None) -> None:
        """Note a finished step."""
        self.losses.append(record.loss)
        self.step_s.append(record.step_s)
        self.kept.append((record, measured))
        del self.kept[:-_NUM_KEPT]
        for device, peak in record.peak_bytes.items():
            self.peak_bytes[device] = max(peak, self.peak_bytes.get(device, 0))
        self.watch.on_step(number, record)

    def middle(self) -> tuple[StepRecord, Timeline | None]:
        """Return the step with the median time among the latest steps."""
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
    """Run some steps of a plan; ``source`` is the planned model if this program has it."""
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
    assert predicted is not None, "a run that is ready was simulated"
    if transfers is not None and record.op_start_s and run.plan.device_of is not None:
        measured = measured_timeline(record, run.plan.device_of, transfers, len(names))
    return RunResult(
        backend=run.backend,
        runs_on=dict(run.places),
        losses=tuple(steps.losses),
        step_s=tuple(steps.step_s),
        predicted_step_s=run.predicted_step_s or predicted.makespan_s,
        predicted=predicted,
        measured=measured,
        peak_bytes={names[device]: peak for device, peak in steps.peak_bytes.items()},
        dtype=run.dtype,
        agreement=run.agreement,
    )


def choose_backend(kind: Kind, wanted: str, devices: Sequence[Device]) -> tuple[str, list[str]]:
    """Return the backend that runs a plan on this machine, and the real device of each device.

    Raises `UsageError` if the wanted backend cannot run the plan here.
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
    """Return the backend that ``auto`` selects for a plan on this machine."""
    if kind in ("budget", "waves") or (len(devices) == 1 and kind != "transformer"):
        return "single"
    if kind == "placement":
        num_accelerators = sum(not device.kind.is_cpu for device in devices)
        return "single" if 0 < num_accelerators <= gpus else "gloo"
    return "nccl" if len(devices) <= gpus else "gloo"


# ── checks and models of each kind of plan ───────────────────────────────────────────────────────


def _placement(run: _Run) -> _Run:
    problem, plan = run.problem, run.plan
    if plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    found = list(structure_violations(plan, problem))
    found += [] if found else update_violations(plan.device_of, problem)
    raise_violations(found, plan.planner)
    run = run.chosen()
    predicted = simulate(problem, plan)
    # Before the model takes memory itself.
    run.require_memory(predicted)
    return replace(run, predicted=predicted).with_model()


def _split_batch(run: _Run) -> _Run:
    problem, plan = run.problem, run.plan
    require_structure(plan, problem)
    # Gloo and NCCL sum gradients over their own routes, not over planned trees.
    plan = plan.without(Communication)
    predicted = simulate(problem, plan)
    run = replace(run, plan=plan, predicted=predicted).chosen()
    is_single = run.backend == "single"
    # In one process the first device runs the microbatches of all replicas.
    run.require_memory(simulate(problem, _on_one_device(plan)) if is_single else predicted)
    run = run.with_model()
    required_optimizer(problem.graph.meta)
    return run


def _transformer(run: _Run) -> _Run:
    """Prepare a plan of a transformer's shape, which trains the built-in model of that shape."""
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
    """Prepare a memory plan or waves on one device."""
    problem, plan = run.problem, run.plan
    require_structure(plan, problem)
    if len(used_devices(problem, plan)) > 1:
        raise UsageError(
            f"{KIND_NAMES[run.kind]} on several devices: one process per device must run them",
            hint="run it in your own loop with hocket launch, or plan one device",
        )
    run = run.chosen()
    waves = plan.get(Waves)
    # A CPU has one allocator, so each stream reuses memory that the other stream has freed.
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
    """Train all steps in this process."""
    options, built, is_placement = run.options, run.built, run.kind == "placement"
    assert built is not None
    plan = _on_one_device(run.plan) if run.kind == "shares" else run.plan
    place = next(iter(run.places.values()))
    has_peak = run.kind in ("budget", "waves")
    with torch_threads(options.threads), torch.random.fork_rng(), ExitStack() as counting:
        training = SyntheticTraining(
            SavedPlan(run.problem, plan),
            SyntheticModel(built.module, lambda number: built.batch, built.loss, built.name),
            torch.device(place), seed=options.seed,
        )  # fmt: skip
        tracker = MemoryTracker()
        if has_peak and place == "cpu":
            counting.enter_context(tracker)
            tracker.track(training.lasting())
        for number in range(1, options.steps + 1):
            steps.watch.on_progress(f"step {number} of {options.steps}")
            if number > _NUM_COUNTED:
                counting.close()
            record = training.step(number, timed=is_placement)
            timings = training.loop.timings
            if has_peak and place != "cpu":
                record.peak_bytes[0] = int(torch.cuda.max_memory_allocated())
            elif has_peak and number <= _NUM_COUNTED:
                record.peak_bytes[0] = tracker.peak_bytes
            measured = None
            if is_placement and timings is not None:
                peak_bytes = timings.measured.peak_bytes.copy()
                for device, num_bytes in training.state_bytes().items():
                    peak_bytes[device] += num_bytes
                measured = replace(timings.measured, peak_bytes=peak_bytes)
            steps.add(number, record, measured)


_NUM_COUNTED = 3
"""Steps on a CPU whose memory is tracked storage by storage, which is slow. State that is swapped
in takes its memory from the backward pass of the second step on."""


def _on_one_device(plan: Plan) -> Plan:
    """Return a plan that runs all microbatches on the first device."""
    replicas = plan[Parallel].replicas
    sizes = tuple(size for replica in replicas for size in replica.microbatches)
    only = Replica(devices=replicas[0].devices[:1], microbatches=sizes)
    return plan.having(Parallel(replicas=(only,)))
