"""A memory plan carried out: build the model, rehearse, train within the budget, compare."""

from __future__ import annotations

from typing import Any

import torch

from hocket.base.errors import UsageError
from hocket.capture.fake import batch_tensors
from hocket.capture.optimizer import required_optimizer
from hocket.plan.files import SavedPlan
from hocket.plan.make import ON_THIS_MACHINE
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import require_structure
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.budget import LoopedModel
from hocket.runtime.options import Onlookers, RunOptions
from hocket.runtime.rebuild import ModelSource, build
from hocket.runtime.record import StepRecord
from hocket.runtime.result import RunResult
from hocket.runtime.strategies.budget import budget_strategy
from hocket.runtime.task import LoopOptions, TrainingTask
from hocket.runtime.train.made_optimizer import torch_optimizer, trained_parameters
from hocket.runtime.train.predicted import claimed_step_s
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.training import TrainingLoop
from hocket.simulate import simulate


def run_budget(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: Onlookers,
) -> RunResult:
    """Train for some steps within the plan's budget, by the model's own modules."""
    options.require_meaning("budget")
    require_structure(plan, problem)
    if problem.cluster.num_devices != 1:
        raise UsageError(
            f"a memory plan of {problem.cluster.num_devices} devices cannot be carried out",
            hint="plan for one device with hocket fit",
        )
    predicted = simulate(problem, plan)
    device = problem.cluster.devices[0]
    backend, (place,) = choose("budget", options.backend, [device])
    watch.on_progress(f"building {problem.graph.name}")
    work = _looped(problem, plan, options, source, watch, place)
    records: list[StepRecord] = []
    EXECUTORS["budget"][backend].run(work, options, watch.keeping(records))
    peaks = [record.peak_bytes[0] for record in records if 0 in record.peak_bytes]
    return RunResult(
        backend=backend,
        runs_on={device.name: place},
        losses=tuple(record.loss for record in records),
        step_s=tuple(record.step_s for record in records),
        predicted_step_s=claimed_step_s(problem, plan),
        predicted=predicted,
        measured=None,
        peak_bytes={device.name: max(peaks)} if peaks else {},
    )


def _looped(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: Onlookers,
    place: str,
) -> LoopedModel:
    """The model itself in training, rehearsed."""
    built = build(problem.graph, model=options.model, source=source, seed=options.seed)
    update = required_optimizer(problem.graph.meta)
    optimizer = torch_optimizer(update, trained_parameters(update, built.module))
    # Recorded as it was planned, whatever it is carried out on.
    kernels = str(problem.graph.meta.get("device") or place)
    name = built.name or problem.graph.name
    recipe = Recipe(loss=built.loss, update=update, device=kernels, name=name)
    watch.on_progress("rehearsing a step")
    module, loop = built.module, LoopOptions()
    task = TrainingTask(
        model=module, optimizer=optimizer, batch=built.batch, recipe=recipe, options=loop,
        device=torch.device(place),
    )  # fmt: skip
    strategy: Any = budget_strategy(task, SavedPlan(problem, plan), ON_THIS_MACHINE, None).strategy
    train = TrainingLoop(module, optimizer, strategy, loop)
    rows = [tensor for _, tensor in batch_tensors(built.batch)]
    return LoopedModel(train, lambda: (*strategy.lasting, *rows), built.batch, place)
