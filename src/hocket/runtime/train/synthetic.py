"""A plan's own model in training on its synthetic batch, by the strategies of `hocket.prepare`.

`hocket run` does this in one process or in each of several: the same replicas, pipelines and shards
as in a user's loop.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.capture.loss import Loss
from hocket.capture.model import UntraceableError
from hocket.capture.optimizer import required_optimizer
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.runtime.record import StepRecord
from hocket.runtime.smaller import with_graph
from hocket.runtime.strategy import ReportsProgress, Strategy
from hocket.runtime.task import LoopOptions
from hocket.runtime.train.divided.build import DividedTask, DivisionWarning
from hocket.runtime.train.divided.planned import parallel_strategy
from hocket.runtime.train.made_optimizer import torch_optimizer, trained_parameters
from hocket.runtime.train.modules import MovedModules
from hocket.runtime.train.programs import Programs
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.training import TrainingLoop

PER_STEP = 1_000
"""How finely the progress of a step is counted."""


class SyntheticTraining:
    """A model that is trained on one batch over and over, as a plan that splits the batch says."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        model: nn.Module,
        batch: Any,
        loss: Loss | str | None,
        device: torch.device,
        *,
        seed: int,
    ) -> None:
        """All ranks of the plan call it together; ``device`` is that of this one."""
        update = required_optimizer(problem.graph.meta)
        optimizer = torch_optimizer(update, trained_parameters(update, model))
        recipe = Recipe(loss=loss, update=update, device=device.type, name=problem.graph.name)
        options = LoopOptions(seed=seed)

        def make_inner(how: Recipe, rows: Any, drawn: int | None) -> Strategy:
            return _on_one_device(problem, model, rows, how, device, drawn)

        task = DividedTask(
            model=model, optimizer=optimizer, batch=batch, recipe=recipe, device=device,
            make_inner=make_inner, seed=seed, count=None, max_shapes=options.max_shapes,
            weights=None,
        )  # fmt: skip
        with warnings.catch_warnings():
            # They warn of what a loop may rely on (batch norm); a run is a trial.
            warnings.simplefilter("ignore", DivisionWarning)
            self._strategy = parallel_strategy(task, problem, plan)
        self._batch = batch
        self._loop = TrainingLoop(model, optimizer, self._strategy, options)
        # The run itself compares measured with predicted, at its end.
        self._loop.watch.predicted_s = None

    def step(self, number: int, on_move: Callable[[int, int], None]) -> StepRecord:
        """Train once; ``on_move`` is told the step and how far it is, of `PER_STEP`."""
        if isinstance(self._strategy, ReportsProgress):
            self._strategy.report_progress(lambda part: on_move(number, int(part * PER_STEP)))
        on_move(number, 0)
        record = StepRecord(start_s=time.perf_counter())
        record.loss = float(self._loop.step(self._batch))
        record.end_s = time.perf_counter()
        return record


def _on_one_device(
    problem: Problem,
    model: nn.Module,
    rows: Any,
    recipe: Recipe,
    device: torch.device,
    seed: int | None,
) -> Strategy:
    """The model on the device of this process; called where its step cannot be traced."""
    devices = [device] * problem.cluster.num_devices
    try:
        graph, program = recipe.trace(model, rows, "train")
    except UntraceableError as error:
        everywhere = np.zeros(problem.graph.num_ops, dtype=np.int32)
        model.to(device)
        return MovedModules(model, recipe, problem.graph, everywhere, devices, lost=error.message)
    alone = Plan(planner="one device").placing(np.zeros(graph.num_ops, dtype=np.int32))
    return Programs(
        model, rows, recipe, with_graph(problem, graph), alone, program, devices,
        seed=seed, outputs=False, max_shapes=LoopOptions().max_shapes, replay=True,
        is_ranked=False,
    )  # fmt: skip
