"""A plan that splits the batch, run: build the model, train, compare with the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hocket.base.errors import UsageError
from hocket.capture.optimizer import required_optimizer
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel
from hocket.plan.verify import require_structure
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.shares import SplitModel
from hocket.runtime.options import Onlookers, RunOptions
from hocket.runtime.rebuild import ModelSource, build
from hocket.runtime.record import StepRecord
from hocket.runtime.result import RunResult
from hocket.runtime.room import require_room
from hocket.runtime.smaller import smaller_shares
from hocket.simulate import Timeline, simulate
from hocket.simulate.engine import simulate_parallel


def run_shares(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: Onlookers,
) -> RunResult:
    """Train for some steps with one process per device, or with all microbatches in this one."""
    options.require_meaning("shares")
    require_structure(plan, problem)
    shares = plan[Parallel]
    required_optimizer(problem.graph.meta)
    planned_samples = shares.num_samples
    if options.scale < 1:
        problem, shares = smaller_shares(problem, shares, options.scale)
        plan = plan.having(shares)
    # Gloo and NCCL sum gradients as they do, whatever the plan says of its links.
    plan = plan.without(Communication)
    predicted = simulate(problem, plan)
    names = list(shares.devices)
    found = {device.name: device for device in problem.cluster.devices}
    wanted = options.backend
    if wanted == "auto" and source is not None:
        wanted = "single"  # a model that is only here cannot be built elsewhere
    backend, places = choose("shares", wanted, [found[name] for name in names])
    _require_room(problem, shares, predicted, backend, places, planned_samples)
    watch.on_progress(f"building {problem.graph.name}")
    model = build(
        problem.graph, model=options.model, source=source, seed=options.seed,
        is_scaled=options.scale < 1,
    )  # fmt: skip
    records: list[StepRecord] = []
    work = SplitModel(problem, plan, model, names, places)
    EXECUTORS["shares"][backend].run(work, options, watch.keeping(records))
    return RunResult(
        backend=backend,
        runs_on=dict(zip(names, places, strict=True)),
        losses=tuple(record.loss for record in records),
        step_s=tuple(record.step_s for record in records),
        predicted_step_s=predicted.makespan_s,
        predicted=predicted,
        measured=None,
        peak_bytes={},
        executed=(problem, plan) if options.scale < 1 else None,
    )


def _require_room(
    problem: Problem,
    shares: Parallel,
    predicted: Timeline,
    backend: str,
    places: Sequence[str],
    planned_samples: int,
) -> None:
    """Refuse a split for which this machine has no room.

    In one process all microbatches run on one device, which holds the whole model.
    """
    names = problem.cluster.device_names
    num_processes = EXECUTORS["shares"][backend].processes_per_device * len(places)
    require = partial(require_room, problem, predicted, planned_samples=planned_samples)
    as_one = replace(shares, replicas=tuple(
        replace(replica, devices=replica.devices[:1], cuts=()) for replica in shares.replicas
    ), zero=0, tensor=1)  # fmt: skip
    alone = simulate_parallel(problem, as_one)[1]
    first = [names.index(replica.devices[0]) for replica in shares.replicas]
    largest = max(first, key=lambda device: int(alone.peak_bytes[device]))
    in_turn = partial(
        require_room, problem, alone, {largest: places[0]}, num_processes=1,
        planned_samples=planned_samples,
    )  # fmt: skip
    devices = [names.index(name) for name in shares.devices]
    if not num_processes:
        in_turn()
        return
    try:
        require(
            dict(zip(devices, places, strict=True)),
            num_processes=1 + num_processes,
            num_models=len(devices),
        )
    except UsageError as error:
        try:
            in_turn()
        except UsageError:
            raise error from None
        hint = f"take one microbatch after the other with --backend single; or {error.hint}"
        raise UsageError(error.message, hint=hint) from None
