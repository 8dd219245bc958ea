"""Shares of a batch carried out: build the model, train, compare with the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hocket.base.errors import UsageError
from hocket.capture.optimizer import required_optimizer
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Shares
from hocket.plan.verify import require_structure
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.shares import SharedModel
from hocket.runtime.options import Onlookers, RunOptions
from hocket.runtime.rebuild import ModelSource, build
from hocket.runtime.record import StepRecord
from hocket.runtime.result import RunResult
from hocket.runtime.room import require_room
from hocket.runtime.shared.job import ShareJob
from hocket.runtime.shared.rows import rows_of_replicas
from hocket.runtime.smaller import smaller_shares
from hocket.simulate import Timeline, simulate
from hocket.simulate.engine import simulate_shares


def run_shares(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: Onlookers,
) -> RunResult:
    """Carry out shares for some steps; the stages of a pipeline run in one process, as one."""
    options.require_meaning("shares")
    require_structure(plan, problem)
    shares = plan[Shares]
    update = required_optimizer(problem.graph.meta)
    planned_samples = shares.num_samples
    if options.scale < 1:
        problem, shares = smaller_shares(problem, shares, options.scale)
        plan = plan.having(shares)
    # Gloo and NCCL exchange as they do, whatever the plan says of its links.
    predicted = simulate(problem, plan.without(Communication))
    names = [replica.devices[0] for replica in shares.replicas]
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
    job = ShareJob(
        model=model.name,
        options=model.options,
        loss=model.loss if isinstance(model.loss, str) else None,
        update=update,
        rows=rows_of_replicas([replica.microbatches for replica in shares.replicas]),
        num_samples=shares.num_samples,
        steps=options.steps,
        seed=options.seed,
    )
    records: list[StepRecord] = []

    work = SharedModel(job, model.module, model.batch, model.loss, names, places)
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
        carried=(problem, plan) if options.scale < 1 else None,
    )


def _require_room(
    problem: Problem,
    shares: Shares,
    predicted: Timeline,
    backend: str,
    places: Sequence[str],
    planned_samples: int,
) -> None:
    """Refuse shares for which this machine has no room.

    Every process holds the whole model: stages run as one, and nothing is sharded.
    """
    if shares.sharded or any(len(replica.devices) > 1 for replica in shares.replicas):
        whole = [
            replace(replica, devices=replica.devices[:1], cuts=()) for replica in shares.replicas
        ]
        as_run = replace(shares, replicas=tuple(whole), sharded=False, tensor=1)
        predicted = simulate_shares(problem, as_run)[1]
    names = problem.cluster.device_names
    devices = [names.index(replica.devices[0]) for replica in shares.replicas]
    num_processes = EXECUTORS["shares"][backend].processes_per_device * len(devices)
    require = partial(require_room, problem, predicted, planned_samples=planned_samples)
    # One after the other, in this process, the largest needs most.
    largest = devices.index(max(devices, key=lambda device: int(predicted.peak_bytes[device])))
    in_turn = partial(require, {devices[largest]: places[largest]}, num_processes=1)
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
        hint = f"carry out one share after the other with --backend single; or {error.hint}"
        raise UsageError(error.message, hint=hint) from None
