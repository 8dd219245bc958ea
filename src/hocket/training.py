"""``hocket.prepare``: train a model in the user's own loop under a plan.

`prepare` reads or makes a plan, chooses its strategy, and returns a `Training`, whose `step` trains
on one batch. If a plan of several processes is predicted to be faster, a message names it.

train = hocket.prepare(model, optimizer, batch, on="2xv100-16g")
for batch in batches:
    loss = train.step(batch)
"""

# ruff: noqa: E402

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hocket.api.planned import Planned, planned_again
from hocket.base.config import PLAN_VARIABLE, rank_profile, rank_variables
from hocket.base.errors import HocketError, UsageError
from hocket.base.extras import require
from hocket.base.progress import progress
from hocket.base.units import format_seconds
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan, read_plan
from hocket.plan.make import ON_THIS_MACHINE, make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel
from hocket.planners.parallel.compare import can_split_batch, compare_parallel
from hocket.transformer import ParallelConfig

require("torch", "training")

import torch
from torch import nn

from hocket.capture.given import first_batch, refuse_ranks, supervised, unwrapped
from hocket.capture.loss import Loss
from hocket.capture.sizes import knowing_sizes, resized
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
from hocket.runtime.strategy import LoopOptions, Timings, TrainingTask, claimed_step_s, innermost
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop, is_first_rank

__all__ = ["PadTo", "Training", "prepare"]

PlanLike = str | Path | Planned | SavedPlan | ParallelConfig
"""A plan with its problem, a plan file, or a parallel config without a plan."""
_PROFILED_STEP = 4
"""Number of the step that is timed for a profile; in earlier steps libraries choose kernels."""


class Training(TrainingLoop):
    """A training loop under a plan; returned by `prepare`."""

    planned: Planned | SavedPlan | None = None
    """The plan that was passed to `prepare`, with its problem."""
    plan: Plan
    """The plan that is executed: the plan passed to `prepare`, or the plan that `prepare` made."""
    predicted_step_s: float | None = None
    """Predicted step time on the plan's devices, whatever devices are in use.

    None for a `ParallelConfig` without a plan, for ``compiled`` steps, and for a budget for a model
    that cannot be traced.
    """
    advice: str = ""
    """Message that names a faster plan of several processes, if one was found for ``on=``."""

    def step(self, batch: Any, *, timed: bool = False, **options: Any) -> torch.Tensor:
        """Train as `TrainingLoop.step` does; ``hocket launch --profile`` times one step."""
        path = rank_profile()
        is_profiled = bool(path) and self.num_steps + 1 == _PROFILED_STEP and is_first_rank()
        loss = super().step(batch, timed=timed or is_profiled, **options)
        if is_profiled and self.timings is not None:
            write_profile(self._measured(), path)
        return loss

    def progress(self) -> str:
        """Return one line: loss, samples per second, measured and predicted step time."""
        line = super().progress()
        if self.watch.predicted_s is not None or self.predicted_step_s is None:
            return line
        return f"{line}; {format_seconds(self.predicted_step_s)} predicted on the planned devices"

    @property
    def memory(self) -> BudgetPlan | None:
        """The memory plan that is executed; None without a budget."""
        inner = innermost(self._strategy)
        return inner.budget_plan if isinstance(inner, BudgetedModel) else None

    def report(self, page: str | Path, trace: str | Path, record: str | Path | None = None) -> None:
        """Write an HTML report of the last timed step, and a trace of it with its prediction.

        ``train.step(batch, timed=True)`` times a step. Predicted and measured step time are also
        written to the file ``record``, for ``hocket calibrate --from``.
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
        """Return a new plan, made with the op times of the last timed step in place of estimates.

        The current training does not change. If ``step_s`` of the new plan is shorter, save a
        checkpoint and call ``prepare(…, plan=…)``. The op times are also written to the file
        ``profile``, for ``hocket plan --profile``.
        """
        problem, plan, _, _ = self._timed()
        found = self._measured()
        if profile is not None:
            write_profile(found, profile)
        return planned_again(self.planned or SavedPlan(problem, plan), found)

    def _measured(self) -> Profile:
        """Return the op times of the last timed step, for the device type of this rank."""
        problem, _, _, measured = self._timed()
        found = profile_of_spans(
            problem.graph, problem.cluster, measured.op_device,
            measured.op_end_s - measured.op_start_s,
        )  # fmt: skip
        if self.planned is None or self.planned.plan.get(Parallel) is None:
            return found
        # The times are valid for the device type of this rank only.
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
    """Return a training loop for ``model`` and ``optimizer`` on batches like ``batch``.

    ``plan`` is a plan of this model, or a plan file; without it a plan is made for the cluster
    ``on``. A batch is a tensor, a tuple (passed by position) or a mapping (by keyword) of tensors,
    or any object that ``forward(model, batch)`` takes. The model or ``forward`` returns the loss,
    or outputs from which ``loss`` computes the loss. `LoopOptions` describes the options that are
    not named here. A model that cannot be traced op by op is placed module by module, with a
    warning that names the reason and the lost features.

    ``memory`` is a memory budget ("8GiB") for the only device, or for each device of a
    data-parallel plan. Tensors that do not fit are offloaded to the host or recomputed, as
    ``train.memory`` describes. When a step returns, all parameters are updated; with
    ``async_update`` updates on the host overlap with the next step, which is faster.

    If ranks split the batch, ``count`` returns the weight of a part of it, by default its number of
    samples. ``weights`` names files from which each rank reads its part of a model on the meta
    device. Replicas sum gradients in the gradients' own dtype, as DistributedDataParallel does, or
    in ``reduce_dtype``, such as ``torch.float32`` for a model in bfloat16.

    ``compiled`` trains without a plan on one device, with kernels of ``torch.compile``; a string
    names its backend. On a GPU steps are replayed as CUDA graphs.
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
    # `hocket launch` passes its plan to the ranks in this variable.
    if plan is None and PLAN_VARIABLE in variables:
        plan = variables[PLAN_VARIABLE]
    given = read_plan(plan) if isinstance(plan, str | Path) else plan
    saved = SavedPlan(given.problem, given.plan) if isinstance(given, Planned) else given
    # An earlier `prepare` may have patched the model's forwards; tracing needs the original ones.
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
            # `budget_strategy` shows its own, finer stages. Only the first rank shows progress.
            is_shown = memory is None and variables.get("RANK", "0") == "0"
            if is_shown:
                doing.stage("trace the step" + ("" if saved else " and choose a plan"))
            prepared = choose_strategy(task, saved, on=on, memory=memory)
            train = Training(model, optimizer, prepared.strategy, options)
            train.plan, train.predicted_step_s = prepared.plan, prepared.step_s
            train.correction = prepared.correction
            train.planned = None if isinstance(given, ParallelConfig) else given
            if prepared.searched is not None:
                if is_shown:
                    doing.stage("compare with plans of several processes")
                # Traces at other batch sizes must not change the random draws of the loop.
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
            "compiled= trains on one device without a plan or a memory budget",
            hint="leave out compiled=; or leave out plan= and memory=, and start one process",
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


# ── advice: a faster plan that needs a process per device ────────────────────────────────────────

_WORTHWHILE = 1.02
"""Minimum ratio of step times for advice; smaller differences are within prediction errors."""


def faster_with_processes(placed: SavedPlan, batch: Any, traced: Callable[[Any], Graph]) -> str:
    """Return a message that names a faster plan of several processes; empty if there is none.

    ``traced`` returns the graph of a step on a batch of the same structure and any size.
    """
    graph = knowing_sizes(placed.problem.graph, lambda size: traced(resized(batch, size)))
    problem = make_problem(graph, placed.problem.cluster)
    if not can_split_batch(problem):
        return ""
    try:
        winner = compare_parallel(problem).winner
    # Advice is optional, so a failed search does not stop the training.
    except HocketError:
        return ""
    if winner is None or winner.plan is None or winner.step_s is None:
        return ""
    split = winner.plan.get(Parallel)
    placed_s = claimed_step_s(placed.problem, placed.plan)
    if split is None or len(split.devices) < 2 or placed_s < _WORTHWHILE * winner.step_s:
        return ""
    num_used = len(set(placed.plan.device_of.tolist())) if placed.plan.device_of is not None else 1
    how = "by op placement" if num_used > 1 else "on one device"
    strategy = winner.plan.notes.get("how", winner.planner)
    return (
        f"{strategy} takes {format_seconds(winner.step_s)} per step with hocket launch; "
        f"in this process {format_seconds(placed_s)} {how} "
        "(hint: hocket.auto(model, batch, on=…).save('plan.json'), then hocket launch plan.json)"
    )
