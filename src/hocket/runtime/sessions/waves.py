"""Two waves carried out: build the model, record a wave, train in two lanes, compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.optimizer import required_optimizer
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, Parallel
from hocket.plan.verify import require_structure
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.budget import LoopedModel
from hocket.runtime.options import Onlookers, RunOptions
from hocket.runtime.rebuild import ModelSource, build
from hocket.runtime.record import StepRecord
from hocket.runtime.result import RunResult
from hocket.runtime.smaller import with_graph
from hocket.runtime.task import LoopOptions
from hocket.runtime.train.divided.accumulated import AccumulatedAlone
from hocket.runtime.train.divided.shares import microbatches
from hocket.runtime.train.made_optimizer import torch_optimizer, trained_parameters
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.replayed_waves import make_waves
from hocket.runtime.train.waves import wave_order
from hocket.runtime.training import TrainingLoop
from hocket.simulate import simulate


def run_waves(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: Onlookers,
) -> RunResult:
    """Train for some steps in two lanes of one device, by recorded calls."""
    options.require_meaning("waves")
    require_structure(plan, problem)
    shares = plan[Parallel]
    if len(shares.replicas) > 1:
        raise UsageError(
            f"waves of {len(shares.replicas)} devices take a process for each",
            hint="hocket launch carries them out in your own loop; plan one device to run it here",
        )
    update = required_optimizer(problem.graph.meta)
    (name,) = shares.devices
    device = next(each for each in problem.cluster.devices if each.name == name)
    backend, (place,) = choose("waves", options.backend, [device])
    # A processor is given what lives and reserves nothing.
    held = plan if place != "cpu" else plan.having(replace(plan[Lanes], lived_bytes=0))
    predicted = simulate(problem, held)
    watch.on_progress(f"building {problem.graph.name}")
    built = build(problem.graph, model=options.model, source=source, seed=options.seed)
    watch.on_progress("recording a wave")
    # Recorded as it was planned, whatever it is carried out on.
    kernels = str(problem.graph.meta.get("device") or place)
    label = built.name or problem.graph.name
    recipe = Recipe(loss=built.loss, update=update, device=kernels, name=label)
    train = waved_loop(problem, plan, built.module, built.batch, recipe, torch.device(place))
    records: list[StepRecord] = []

    def lasting() -> Iterable[torch.Tensor]:
        return (*built.module.parameters(), *built.module.buffers())

    work = LoopedModel(train, lasting, built.batch, place)
    EXECUTORS["waves"][backend].run(work, options, watch.keeping(records))
    peaks = [record.peak_bytes[0] for record in records if 0 in record.peak_bytes]
    return RunResult(
        backend=backend,
        runs_on={name: place},
        losses=tuple(record.loss for record in records),
        step_s=tuple(record.step_s for record in records),
        # What waits of the lanes cost is in what the planner claims alone.
        predicted_step_s=plan.claims.step_s or predicted.makespan_s,
        predicted=predicted,
        measured=None,
        peak_bytes={name: max(peaks)} if peaks else {},
    )


def waved_loop(
    problem: Problem,
    plan: Plan,
    model: nn.Module,
    batch: Any,
    recipe: Recipe,
    device: torch.device,
) -> TrainingLoop:
    """A loop over whole batches, whose microbatches two lanes take.

    A CUDA device is given all waves of a step at once, as a CUDA graph.
    """
    shares, options = plan[Parallel], LoopOptions()
    sizes = shares.replicas[0].microbatches
    model.to(device)
    first = microbatches(batch, sizes, None)[0][0]
    graph, program = recipe.trace(model, first, "train")
    wave = with_graph(problem, graph)
    everywhere = Plan(planner=plan.planner).placing(np.zeros(graph.num_ops, dtype=np.int32))
    inner = Programs(
        model, first, recipe, wave, everywhere, program, [device] * problem.cluster.num_devices,
        seed=None, outputs=False, max_shapes=options.max_shapes, replay=True, is_ranked=False,
    )  # fmt: skip
    waves = make_waves(inner, wave_order(problem, shares, plan[Lanes]), device)
    strategy = AccumulatedAlone(inner, sizes, count=None, device=device, waves=waves)
    parameters = trained_parameters(recipe.update, model)
    return TrainingLoop(model, torch_optimizer(recipe.update, parameters), strategy, options)
