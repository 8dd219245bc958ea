"""A division carried out: refuse, check at toy size, train, compare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.transformer_plan import TransformerPlan
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.division import DividedModel
from hocket.runtime.options import Onlookers, RunOptions
from hocket.runtime.parallel.check import check_division
from hocket.runtime.parallel.fits import require_memory
from hocket.runtime.parallel.jobs import TRAINED_DTYPES, make_job
from hocket.runtime.parallel.refusals import refuse_plan
from hocket.runtime.parallel.spawn import losses_of
from hocket.runtime.record import StepRecord
from hocket.runtime.result import RunResult, middle_step
from hocket.simulate import Timeline, simulate


def run_division(problem: Problem, plan: Plan, options: RunOptions, watch: Onlookers) -> RunResult:
    """Carry out a division for some steps.

    Refuses what PyTorch cannot do or does wrongly, and what this machine has no room for.
    """
    divided = TransformerPlan(problem, plan)
    options.require_meaning("division")
    refuse_plan(divided)
    predicted = simulate(problem, plan)
    names = [name for devices in divided.devices for name in devices]
    found = {device.name: device for device in divided.cluster.devices}
    backend, places = choose("division", options.backend, [found[name] for name in names])
    dtype = options.dtype or ("float32" if backend == "gloo" else _gpu_dtype(divided))
    if backend == "gloo":
        require_memory(divided.model, divided.division, getattr(torch, dtype))
    watch.on_progress(f"checking and building {divided.model.name}")
    agreement = check_division(divided) if options.checks else None
    records: list[StepRecord] = []

    job = make_job(divided.model, divided.division, divided.schedule, dtype=dtype)
    EXECUTORS["division"][backend].run(DividedModel(job, names), options, watch.keeping(records))
    step_s = tuple(record.step_s for record in records)
    middle = middle_step(records, step_s)
    return RunResult(
        backend=backend,
        dtype=dtype,
        runs_on=dict(zip(names, places, strict=True)),
        losses=losses_of(records),
        step_s=step_s,
        predicted_step_s=divided.step_s,
        predicted=predicted,
        measured=_measured(predicted, middle),
        peak_bytes={names[rank]: size for rank, size in middle.peak_bytes.items()},
        agreement=agreement,
    )


def _gpu_dtype(plan: TransformerPlan) -> str:
    return plan.dtype if plan.dtype in TRAINED_DTYPES else TRAINED_DTYPES[0]


def _measured(predicted: Timeline, record: StepRecord) -> Timeline | None:
    """The predicted actions with the times that they had; what follows them was not timed."""
    if not record.op_start_s:
        return None
    num_actions = predicted.num_works - predicted.num_devices
    last_s = np.zeros(predicted.num_devices)
    start_s = np.array([record.op_start_s[n] for n in range(num_actions)]) - record.start_s
    end_s = np.array([record.op_end_s[n] for n in range(num_actions)]) - record.start_s
    np.maximum.at(last_s, predicted.device[:num_actions], end_s)
    start_s = np.concatenate((start_s, last_s))
    return replace(
        predicted,
        makespan_s=record.step_s,
        ready_s=start_s,
        start_s=start_s,
        end_s=np.concatenate((end_s, last_s)),
        peak_bytes=np.zeros_like(predicted.peak_bytes),
    )
