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
from hocket.runtime.check import Agreement, check_parallel
from hocket.runtime.launch import used_devices
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.options import BACKENDS, OnProgress, OnStart, OnStep, RunCallbacks, RunOptions
from hocket.runtime.rebuild import BuiltModel, ModelSource, build
from hocket.runtime.record import StepRecord, measured_timeline
from hocket.runtime.refusals import TRAINED_DTYPES, refuse_plan
from hocket.runtime.result import RunResult, middle_step
from hocket.runtime.room import require_room, require_room_for_states
from hocket.runtime.run_ranks import run_ranks
from hocket.runtime.smaller import smaller_shares, with_graph
from hocket.runtime.strategies.parallel import refuse_degrees
from hocket.runtime.strategies.placed import places_in_process
from hocket.runtime.synthetic import PER_STEP, SyntheticTraining
from hocket.runtime.threads import torch_threads
from hocket.runtime.train.predicted_step import claimed_step_s
from hocket.simulate import Timeline, simulate
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.verify import update_violations

Kind = Literal["placement", "transformer", "shares", "budget", "waves"]
"""By what a plan decides."""
_NUM_KEPT = 8
"""Last steps of which the one in the middle is shown."""
WALK_S = 9.3e-6
"""What the walk over a traced step adds to an op on a processor: it looks tensors up, counts bytes
and notes times in Python, between two ops. ``benchmarks/runtime/walk.py`` on an AMD EPYC, Python
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
class _Work:
    """A plan with its model, ready to run."""

    kind: Kind
    problem: Problem
    plan: Plan
    backend: str
    places: Mapping[str, str]
    """By device of the plan, in the order of ranks: what it runs on here."""
    predicted: Timeline
    predicted_step_s: float
    built: BuiltModel | None
    """None for plans of a transformer's shape, whose ranks build the model of that shape."""
    is_scaled: bool = False
    dtype: str | None = None
    agreement: Agreement | None = None


@dataclass(eq=False)
class _Steps:
    """What was seen of the steps so far."""

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
        """Return the step that stands for the others."""
        found = middle_step([record for record, _ in self.kept], self.step_s)
        return next(pair for pair in self.kept if pair[0] is found)


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
    """Run a plan for some steps; ``on_step`` is called after each one.

    ``on_start`` gets the process ids of the ranks, where there are any, ``on_progress`` what is
    being done. ``source`` is the planned model where it is at hand.
    """
    watch = RunCallbacks(on_start=on_start, on_step=on_step, on_progress=on_progress)
    kind = kind_of(plan)
    options.require_meaning(kind)
    work = _MAKERS[kind](kind, problem, plan, options, source, watch)
    steps, transfers = _Steps(watch), None
    if work.backend == "single":
        _train_here(work, options, steps)
    else:
        report = run_ranks(
            SavedPlan(work.problem, work.plan), work.places, _given(work), options, work.backend,
            replace(watch, on_step=steps.add),
        )  # fmt: skip
        transfers = report.transfers
    record, measured = steps.middle()
    names = work.problem.cluster.device_names
    if transfers is not None and record.op_start_s and work.plan.device_of is not None:
        measured = measured_timeline(record, work.plan.device_of, transfers, len(names))
    return RunResult(
        backend=work.backend,
        runs_on=dict(work.places),
        losses=tuple(steps.losses),
        step_s=tuple(steps.step_s),
        predicted_step_s=work.predicted_step_s,
        predicted=work.predicted,
        measured=measured,
        peak_bytes={names[device]: peak for device, peak in steps.peak_bytes.items()},
        executed=(work.problem, work.plan) if work.is_scaled else None,
        dtype=work.dtype,
        agreement=work.agreement,
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
                f"backend {wanted!r} does not run a {kind}",
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
            f"{len(devices) - num_cpus} accelerators and {num_cpus} processors, this machine has "
            f"{gpus} CUDA devices",
            hint="use --backend gloo for processes on the processor, or export the plan and start "
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

_Maker = Callable[[Kind, Problem, Plan, RunOptions, ModelSource | None, RunCallbacks], _Work]


def _chosen(
    kind: Kind, problem: Problem, plan: Plan, wanted: str, source: ModelSource | None
) -> tuple[str, dict[str, str]]:
    """Return the backend, and what each used device of the plan runs on."""
    names = used_devices(problem, plan)
    found = {device.name: device for device in problem.cluster.devices}
    if source is not None and wanted == "auto":
        wanted = "single"
    backend, places = choose_backend(kind, wanted, [found[name] for name in names])
    if source is not None and backend != "single":
        raise UsageError(
            "a model that is only in this program cannot be built by other processes",
            hint="run it with backend='single', or name a function that builds it",
        )
    return backend, dict(zip(names, places, strict=True))


def _placement(
    kind: Kind,
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: RunCallbacks,
) -> _Work:
    if plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    found = list(structure_violations(plan, problem))
    found += [] if found else update_violations(plan.device_of, problem)
    raise_violations(found, plan.planner)
    backend, places = _chosen(kind, problem, plan, options.backend, source)
    indices = {problem.cluster.device_names.index(name): place for name, place in places.items()}
    _require_slowdowns(options, problem, backend)
    num_ranks = 0 if backend == "single" else len(places)
    problem = with_walk(problem, indices)
    predicted = simulate(problem, plan)
    if options.scale == 1:
        # Before the model takes memory itself; a smaller batch is known only once it is captured.
        require_room(problem, predicted, indices, num_processes=1 + num_ranks)
    watch.on_progress(f"building {problem.graph.name}")
    built = build(
        problem.graph, model=options.model, source=source, seed=options.seed, scale=options.scale
    )
    if options.scale < 1:
        planned = problem.graph.meta.get("batch")
        problem = with_walk(with_graph(problem, built.graph), indices)
        plan = replace(plan, work_hash=problem.work_hash)
        predicted = simulate(problem, plan)
        require_room(
            problem, predicted, indices, num_processes=1 + num_ranks,
            planned_samples=planned if isinstance(planned, int) else None,
        )  # fmt: skip
    return _Work(
        kind=kind, problem=problem, plan=plan, backend=backend, places=places,
        predicted=predicted, predicted_step_s=predicted.makespan_s, built=built,
    )  # fmt: skip


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


def _shares(
    kind: Kind,
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: RunCallbacks,
) -> _Work:
    require_structure(plan, problem)
    planned_samples = plan[Parallel].num_samples
    if options.scale < 1:
        problem, shares = smaller_shares(problem, plan[Parallel], options.scale)
        plan = plan.having(shares)
    # Gloo and NCCL sum gradients as they do, whatever the plan says of its links.
    plan = plan.without(Communication)
    predicted = simulate(problem, plan)
    backend, places = _chosen(kind, problem, plan, options.backend, source)
    _require_room_for_replicas(problem, plan[Parallel], predicted, backend, places, planned_samples)
    watch.on_progress(f"building {problem.graph.name}")
    built = build(
        problem.graph, model=options.model, source=source, seed=options.seed,
        is_scaled=options.scale < 1,
    )  # fmt: skip
    required_optimizer(problem.graph.meta)
    return _Work(
        kind=kind, problem=problem, plan=plan, backend=backend, places=places,
        predicted=predicted, predicted_step_s=predicted.makespan_s, built=built,
        is_scaled=options.scale < 1,
    )  # fmt: skip


def _require_room_for_replicas(
    problem: Problem,
    shares: Parallel,
    predicted: Timeline,
    backend: str,
    places: Mapping[str, str],
    planned_samples: int,
) -> None:
    """Refuse a batch split for which this machine has no room.

    In one process all microbatches run on one device, which holds the whole model.
    """
    names = problem.cluster.device_names
    as_one = replace(shares, replicas=tuple(
        replace(replica, devices=replica.devices[:1], cuts=()) for replica in shares.replicas
    ), zero=0, tensor=1)  # fmt: skip
    alone = simulate_parallel(problem, as_one)[1]
    first = [names.index(replica.devices[0]) for replica in shares.replicas]
    largest = max(first, key=lambda device: int(alone.peak_bytes[device]))

    def require_in_turn() -> None:
        place = {largest: next(iter(places.values()))}
        require_room(problem, alone, place, num_processes=1, planned_samples=planned_samples)

    if backend == "single":
        require_in_turn()
        return
    try:
        require_room(
            problem, predicted, {names.index(name): place for name, place in places.items()},
            num_processes=1 + len(places), num_models=len(places), planned_samples=planned_samples,
        )  # fmt: skip
    except UsageError as error:
        try:
            require_in_turn()
        except UsageError:
            raise error from None
        hint = f"take one microbatch after the other with --backend single; or {error.hint}"
        raise UsageError(error.message, hint=hint) from None


def _transformer(
    kind: Kind,
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: RunCallbacks,
) -> _Work:
    """Make a plan of a transformer's shape ready, which trains the built-in model of that shape."""
    divided = TransformerPlan(problem, plan)
    refuse_plan(divided)
    refuse_degrees(divided.config)
    backend, places = _chosen(kind, problem, plan, options.backend, None)
    is_trained = divided.dtype in TRAINED_DTYPES
    usual = divided.dtype if is_trained else TRAINED_DTYPES[0]
    dtype = options.dtype or ("float32" if backend == "gloo" else usual)
    if backend == "gloo":
        require_room_for_states(divided, getattr(torch, dtype))
    agreement = None
    if options.checks:
        watch.on_progress("checking numerics at small size")
        agreement = check_parallel(divided)
    watch.on_progress(f"building {divided.model.name}")
    return _Work(
        kind=kind, problem=problem, plan=plan, backend=backend, places=places,
        predicted=simulate(problem, plan), predicted_step_s=divided.step_s, built=None,
        dtype=dtype, agreement=agreement,
    )  # fmt: skip


def _one_device(
    kind: Kind,
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: RunCallbacks,
) -> _Work:
    """Make a memory plan or waves ready, both of one device."""
    require_structure(plan, problem)
    if len(used_devices(problem, plan)) > 1:
        raise UsageError(
            f"{'waves' if kind == 'waves' else 'a memory plan'} of several devices takes a process "
            "for each",
            hint="hocket launch runs it in your own loop; plan one device to run it here",
        )
    backend, places = _chosen(kind, problem, plan, options.backend, source)
    waves = plan.get(Waves)
    # A CPU has one allocator, so streams share what either of them frees.
    is_cpu = waves is not None and set(places.values()) == {"cpu"}
    held = plan.having(replace(waves, separate_bytes=0)) if waves is not None and is_cpu else plan
    watch.on_progress(f"building {problem.graph.name}")
    built = build(problem.graph, model=options.model, source=source, seed=options.seed)
    required_optimizer(problem.graph.meta)
    watch.on_progress("tracing a step")
    return _Work(
        kind=kind, problem=problem, plan=plan, backend=backend, places=places,
        predicted=simulate(problem, held), predicted_step_s=claimed_step_s(problem, plan),
        built=built,
    )  # fmt: skip


_MAKERS: Mapping[Kind, _Maker] = {
    "placement": _placement, "shares": _shares, "transformer": _transformer,
    "budget": _one_device, "waves": _one_device,
}  # fmt: skip


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def _given(work: _Work) -> dict[str, Any]:
    """Describe the model that ranks build."""
    if work.built is None:
        return {"model": None, "dtype": work.dtype}
    loss = work.built.loss
    return {
        "model": work.built.name, "options": dict(work.built.options),
        "loss": loss if isinstance(loss, str) else None,
    }  # fmt: skip


def _train_here(work: _Work, options: RunOptions, steps: _Steps) -> None:
    """Train for all steps in this process."""
    built, is_placement = work.built, work.kind == "placement"
    assert built is not None
    plan = _on_one_device(work.plan) if work.kind == "shares" else work.plan
    place = next(iter(work.places.values()))
    is_counted = not is_placement and place == "cpu" and work.kind != "shares"

    def tell(number: int, done: int) -> None:
        steps.watch.on_progress(how_far([Position(0.0, number, done)], [PER_STEP], options.steps))

    with torch_threads(options.threads), torch.random.fork_rng(), ExitStack() as counting:
        training = SyntheticTraining(
            SavedPlan(work.problem, plan), built.module, lambda number: built.batch,
            torch.device(place), loss=built.loss, seed=options.seed, name=built.name,
        )  # fmt: skip
        tracker = _counting(counting, training.lasting()) if is_counted else None
        for number in range(1, options.steps + 1):
            if number > _NUM_COUNTED:
                counting.close()
            record = training.step(number, tell, timed=is_placement)
            timings = training.loop.timings
            if tracker is not None and number <= _NUM_COUNTED:
                record.peak_bytes[0] = tracker.peak_bytes
            elif tracker is None and work.kind in ("budget", "waves"):
                record.peak_bytes[0] = int(torch.cuda.max_memory_allocated())
            measured = None
            if is_placement and timings is not None:
                peak_bytes = timings.measured.peak_bytes.copy()
                for device, num_bytes in training.state_bytes().items():
                    peak_bytes[device] += num_bytes
                measured = replace(timings.measured, peak_bytes=peak_bytes)
            steps.add(number, record, measured)


_NUM_COUNTED = 3
"""Steps on a processor whose bytes are counted storage by storage, which takes time. State that
is swapped in has its room there from the backward pass of the second step on."""


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
