"""A parallel run from beginning to end: refuse, check at toy size, train, compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hocket.plan.divided import DividedTraining
from hocket.plan.sections.schedule import StageWork
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.division import DividedModel
from hocket.runtime.options import Onlookers, OnStart, OnStep, RunOptions
from hocket.runtime.parallel.check import Agreement, check_division
from hocket.runtime.parallel.fits import require_memory
from hocket.runtime.parallel.jobs import TRAINED_DTYPES, make_job
from hocket.runtime.parallel.refusals import refuse_plan
from hocket.runtime.parallel.spawn import losses_of
from hocket.runtime.record import StepRecord


@dataclass(frozen=True, eq=False, kw_only=True)
class ParallelRunResult:
    """What happened, beside what was predicted."""

    backend: str
    dtype: str
    """Type of weights and activations."""
    runs_on: Mapping[str, str]
    """By device of the plan: what it was carried out on."""
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    predicted_step_s: float
    predicted_busy_s: tuple[float, ...]
    """Of one device of each pipeline rank, in a step."""
    measured_busy_s: tuple[float, ...]
    """The same in the step of middle length; empty on GPUs, whose actions are not timed."""
    peak_bytes: Mapping[str, int]
    """By device, on GPUs."""
    agreement: Agreement | None
    """How far the division is from one device at toy size, where that was checked."""

    @property
    def median_step_s(self) -> float:
        """Middle time of all steps but the first, which warms up, where there are more."""
        return statistics.median(self.step_s[1:] or self.step_s)

    @property
    def is_finite(self) -> bool:
        """Whether every loss is a number."""
        return all(math.isfinite(loss) for loss in self.losses)


def run_parallel(
    plan: DividedTraining,
    options: RunOptions,
    *,
    on_start: OnStart = lambda process_ids: None,
    on_step: OnStep = lambda number, record: None,
) -> ParallelRunResult:
    """Carry out a parallel plan for some steps; ``on_step`` is told each one when it is done.

    Refuses what PyTorch cannot do or does wrongly, and what this machine has no room for.
    """
    options.require_meaning("division")
    refuse_plan(plan)
    names = [name for devices in plan.devices for name in devices]
    found = {device.name: device for device in plan.cluster.devices}
    backend, places = choose("division", options.backend, [found[name] for name in names])
    dtype = options.dtype or ("float32" if backend == "gloo" else _gpu_dtype(plan))
    if backend == "gloo":
        require_memory(plan.model, plan.division, getattr(torch, dtype))
    agreement = check_division(plan) if options.checks else None
    records: list[StepRecord] = []

    def note(number: int, record: StepRecord) -> None:
        records.append(record)
        on_step(number, record)

    job = make_job(plan.model, plan.division, plan.schedule, dtype=dtype)
    EXECUTORS["division"][backend].run(
        DividedModel(job, names), options, Onlookers(on_start=on_start, on_step=note)
    )
    middle = sorted(records, key=lambda record: record.step_s)[len(records) // 2]
    return ParallelRunResult(
        backend=backend,
        dtype=dtype,
        runs_on=dict(zip(names, places, strict=True)),
        losses=losses_of(records),
        step_s=tuple(record.step_s for record in records),
        predicted_step_s=plan.step_s,
        predicted_busy_s=predicted_busy_s(plan),
        measured_busy_s=_measured_busy_s(plan, middle),
        peak_bytes={names[rank]: size for rank, size in middle.peak_bytes.items()},
        agreement=agreement,
    )


def _gpu_dtype(plan: DividedTraining) -> str:
    return plan.dtype if plan.dtype in TRAINED_DTYPES else TRAINED_DTYPES[0]


def predicted_busy_s(plan: DividedTraining) -> tuple[float, ...]:
    """How long one device of each pipeline rank computes in a step."""
    costs = plan.costs
    backward = [i + w for i, w in zip(costs.input_gradient_s, costs.weight_gradient_s, strict=True)]
    takes = {
        StageWork.FORWARD: costs.forward_s,
        StageWork.BACKWARD: backward,
        StageWork.INPUT_GRADIENT: costs.input_gradient_s,
        StageWork.WEIGHT_GRADIENT: costs.weight_gradient_s,
    }
    schedule = plan.schedule
    works, stages, start = schedule.work.tolist(), schedule.stage.tolist(), schedule.start.tolist()
    return tuple(
        math.fsum(
            takes[StageWork(works[n])][stages[n]] for n in range(start[rank], start[rank + 1])
        )
        for rank in range(schedule.num_devices)
    )


def _measured_busy_s(plan: DividedTraining, record: StepRecord) -> tuple[float, ...]:
    if not record.op_start_s:
        return ()
    start = plan.schedule.start.tolist()
    return tuple(
        math.fsum(
            record.op_end_s[n] - record.op_start_s[n] for n in range(start[rank], start[rank + 1])
        )
        for rank in range(plan.schedule.num_devices)
    )
