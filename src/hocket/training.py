"""``hocket.prepare``: a plan runs the user's own training loop.

train = hocket.prepare(model, optimizer, batch, on="2xv100-16g")
for batch in batches:
    loss = train.step(batch)
"""

# ruff: noqa: E402

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.api.planned import Planned
from hocket.base.config import PLAN_VARIABLE, rank_profile, rank_variables
from hocket.base.errors import UsageError
from hocket.base.extras import require
from hocket.base.progress import progress
from hocket.base.units import format_seconds
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan, read_plan
from hocket.plan.make import ON_THIS_MACHINE
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel
from hocket.transformer import ParallelConfig

require("torch", "training")

import torch
from torch import nn

from hocket.api.refined import planned_again
from hocket.api.several_processes import faster_with_processes
from hocket.capture.given import first_batch, refuse_ranks, supervised, unwrapped
from hocket.capture.loss import Loss
from hocket.capture.step import Forward
from hocket.capture.swap import generators_kept
from hocket.cost.profile import Profile, write_profile
from hocket.cost.spans import profile_of_spans
from hocket.runtime.batches import Padding, PadTo, settled
from hocket.runtime.launch import used_devices
from hocket.runtime.offload.budgeted_model import BudgetedModel
from hocket.runtime.offload.patched_forward import released_model
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.prepare import choose_strategy, is_parallel, may_take_budget
from hocket.runtime.ranks import join_ranks, rank_device
from hocket.runtime.strategies.batch_split import Count
from hocket.runtime.strategies.eager import CompiledModel
from hocket.runtime.strategy import LoopOptions, Timings, TrainingTask, innermost
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop, is_first_rank

__all__ = ["PadTo", "Training", "prepare"]

PlanLike = str | Path | Planned | SavedPlan | ParallelConfig
"""A plan with its problem, the file of one, or bare degrees of parallelism."""
_PROFILED_STEP = 4
"""The step that is timed: the first ones choose kernels."""


class Training(TrainingLoop):
    """A training loop under a plan; made by `prepare`."""

    planned: Planned | SavedPlan | None = None
    """The plan that was given, with its problem."""
    plan: Plan
    """The plan that is executed, given or made by `prepare`."""
    predicted_step_s: float | None = None
    """Predicted time of a step on the plan's devices, also where a run uses others; None for
    a bare `ParallelConfig`, ``compiled`` steps and models that cannot be traced for a budget."""
    advice: str = ""
    """A shorter plan of several processes that was found for ``on=``; empty where there is none."""

    def step(self, batch: Any, *, timed: bool = False, **options: Any) -> torch.Tensor:
        """See `TrainingLoop.step`; under ``hocket launch --profile`` one early step is timed."""
        place = rank_profile()
        is_asked = bool(place) and self.num_steps + 1 == _PROFILED_STEP and is_first_rank()
        loss = super().step(batch, timed=timed or is_asked, **options)
        if is_asked and self.timings is not None:
            write_profile(self._measured(), place)
        return loss

    def progress(self) -> str:
        """One line: loss, samples per second, the step as measured and as predicted."""
        line = super().progress()
        if self.watch.predicted_s is not None or self.predicted_step_s is None:
            return line
        return f"{line}; {format_seconds(self.predicted_step_s)} predicted on the planned devices"

    @property
    def memory(self) -> BudgetPlan | None:
        """The memory plan that is kept, where there is a budget."""
        inner = innermost(self._strategy)
        return inner.budget_plan if isinstance(inner, BudgetedModel) else None

    def report(self, page: str | Path, trace: str | Path, record: str | Path | None = None) -> None:
        """Write the last timed step as a page, and as a trace with the prediction.

        A step is timed by ``train.step(batch, timed=True)``. The file ``record`` gets both step
        times, for ``hocket calibrate --from``.
        """
        from hocket.base.atomic import write_atomically
        from hocket.base.jsonfile import dump_json
        from hocket.cost.measured_steps import run_record
        from hocket.view.report import write_report
        from hocket.view.trace import write_traces

        problem, plan, predicted, measured = self._timed()
        if record is not None:
            found = run_record(
                problem.work_name, problem.cluster, problem.costs.settings,
                predicted.makespan_s, measured.makespan_s,
            )  # fmt: skip
            write_atomically(record, dump_json(found))
        write_traces(trace, problem, plan, {"predicted": predicted, "measured": measured})
        write_report(page, problem, plan, measured, is_measured=True)

    def refine(self, profile: str | Path | None = None) -> Planned:
        """Plan again with the times of the last timed step in place of estimates.

        Its ``step_s`` beside ``explain()`` says whether changing is worth it; train on with
        ``prepare(…, plan=…)`` after a checkpoint. The times are also written to the file
        ``profile``, for ``hocket plan --profile``.
        """
        problem, plan, _, _ = self._timed()
        found = self._measured()
        if profile is not None:
            write_profile(found, profile)
        return planned_again(self.planned or SavedPlan(problem, plan), found)

    def _measured(self) -> Profile:
        """Times of ops in the last timed step, under the name of this rank's kind of device."""
        problem, _, _, measured = self._timed()
        found = profile_of_spans(
            problem.graph, problem.cluster, measured.op_device,
            measured.op_end_s - measured.op_start_s,
        )  # fmt: skip
        if self.planned is None or self.planned.plan.get(Parallel) is None:
            return found
        devices = {device.name: device for device in self.planned.problem.cluster.devices}
        ranks = used_devices(self.planned.problem, self.planned.plan)
        name = ranks[int(rank_variables().get("RANK", "0"))]
        return replace(found, device_kind=devices[name].kind.name)

    def _timed(self) -> Timings:
        if self.timings is None:
            raise UsageError(
                "no step was timed", hint="time one: train.step(batch, timed=True), in one process"
            )
        return self.timings


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    plan: PlanLike | None = None,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    memory: int | str | None = None,
    loss: Loss | str | None = None,
    forward: Forward | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    seed: int | None = None,
    outputs: bool = False,
    max_shapes: int = 8,
    pad: Padding | None = None,
    replay: bool = True,
    async_update: bool = False,
    count: Count | None = None,
    weights: str | Path | None = None,
    compiled: bool | str = False,
    reduce_dtype: torch.dtype | None = None,
) -> Training:
    """Train ``model`` by ``optimizer`` on batches like ``batch``, as a plan says.

    ``plan`` is a plan of this model, or its file; without it one is made for the cluster ``on``. A
    batch is a tensor, a tuple (by position) or a mapping (by keyword) of tensors, or whatever
    ``forward(model, batch)`` takes; that returns the loss, or what ``loss`` finds it in. Where
    ranks divide the batch, ``count`` says what a part of it counts, else its samples; ``weights``
    are files that a model without memory is read from, by each rank its part. The other options
    are explained in `LoopOptions`. A model that cannot be recorded op by op is placed
    module by module, with a warning that says why and what is lost.

    ``memory`` is a budget ("8GiB") that training does not exceed on its one device, or on each
    device of a data-parallel plan: what does not fit is offloaded to the host or recomputed, and
    ``train.memory`` says how. When a step returns,
    all parameters have their updates; with ``async_update`` those on the host run into the next
    step, which is faster.

    Replicas sum gradients in the gradients' own dtype, as DistributedDataParallel does, or in
    ``reduce_dtype``, such as ``torch.float32`` for a model in bfloat16.

    ``compiled`` trains on the one device that is here by kernels of ``torch.compile`` (of its
    backend of that name), without a plan; on a GPU a step of them is launched as a whole.
    """
    options = LoopOptions(
        accumulate=accumulate, clip_norm=clip_norm, seed=seed, outputs=outputs,
        max_shapes=max_shapes, pad=pad, replay=replay, async_update=async_update,
    )  # fmt: skip
    _require_sensible(options)
    refuse_ranks(model)
    model, batch = unwrapped(model), first_batch(batch)
    loss, forward = supervised(model, batch, loss, forward)
    batch = settled(pad(batch) if pad is not None else batch)
    variables = rank_variables()
    if plan is None and PLAN_VARIABLE in variables:
        plan = variables[PLAN_VARIABLE]
    given = read_plan(plan) if isinstance(plan, str | Path) else plan
    saved = SavedPlan(given.problem, given.plan) if isinstance(given, Planned) else given
    # Tracing needs the model's own forwards, also where no plan keeps its limits.
    with released_model(model), generators_kept():
        recipe = TraceOptions(
            loss=loss, forward=forward, update=planned_update(optimizer, model),
            device="cuda" if torch.cuda.is_available() else "cpu", name=type(model).__name__,
        )  # fmt: skip
        is_ranked = join_ranks(variables)
        if compiled:
            _require_alone(saved, memory, is_ranked)
            strategy = CompiledModel(
                model, recipe, torch.device(recipe.device), replay=replay,
                backend="inductor" if compiled is True else compiled,
            )  # fmt: skip
            train = Training(model, optimizer, strategy, options)
            train.plan = Plan(planner="compiled")
            return train
        _require_one_budget(memory, saved, is_ranked)
        has_rank = is_ranked or is_parallel(saved)
        task = TrainingTask(
            model=model, optimizer=optimizer, batch=batch, recipe=recipe, options=options,
            device=rank_device(variables) if has_rank else torch.device(recipe.device),
            is_ranked=is_ranked, count=count, weights=weights, reduce_dtype=reduce_dtype,
        )  # fmt: skip
        with progress(f"hocket.prepare: {recipe.name}") as doing:
            # A budget names its own, finer stages; of several ranks the first one speaks.
            speaks = memory is None and variables.get("RANK", "0") == "0"
            if speaks:
                doing.stage("trace the step" + ("" if saved else " and choose a plan"))
            prepared = choose_strategy(task, saved, on=on, memory=memory)
            train = Training(model, optimizer, prepared.strategy, options)
            train.plan, train.predicted_step_s = prepared.plan, prepared.step_s
            train.correction = prepared.correction
            train.planned = None if isinstance(given, ParallelConfig) else given
            if prepared.searched is not None:
                if speaks:
                    doing.stage("compare with plans of several processes")
                with torch.random.fork_rng():
                    train.advice = faster_with_processes(
                        prepared.searched, batch,
                        lambda other: recipe.trace(model, other, "train")[0],
                    )  # fmt: skip
        if train.advice:
            logging.getLogger("hocket").warning(train.advice)
        return train


def _require_alone(saved: object, memory: object, is_ranked: bool) -> None:
    if saved is not None or memory is not None or is_ranked:
        raise UsageError(
            "compiled steps are for a model that fits on one device, without a plan",
            hint="leave out compiled=, or the plan, the limit of memory or the other ranks",
        )


def _require_sensible(options: LoopOptions) -> None:
    if options.accumulate < 1:
        raise UsageError(
            f"accumulate={options.accumulate} batches make no update", hint="give 1 or more"
        )
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise UsageError(
            f"clip_norm={options.clip_norm:g} leaves no gradient", hint="give a norm above 0"
        )


def _require_one_budget(
    memory: int | str | None, saved: SavedPlan | ParallelConfig | None, is_ranked: bool
) -> None:
    if memory is not None and (saved is not None or is_ranked) and not may_take_budget(saved):
        what = "a plan that is given" if saved is not None else "ranks of a launcher"
        raise UsageError(
            f"memory= makes a plan for one device, which {what} cannot follow",
            hint="give a data-parallel plan, such as plan=hocket.ParallelConfig(data=2), each of "
            "whose devices keeps the budget; or a plan of hocket fit or waves with --memory",
        )
