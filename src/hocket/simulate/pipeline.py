"""Simulate a pipeline's schedule: when each action runs, and what each device holds.

Devices do their actions in order, each as soon as what it needs has arrived; transfers between two
devices take their stated time and hinder nothing. So times are longest paths and the peaks of
memory follow from the order alone: one pass over the actions. The same is expressed for the event
engine by `hocket.simulate.pipeline_graph`, with equal results. O(actions).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray
from hocket.base.errors import CheckError, UsageError
from hocket.cost.parallel.costs import StageCosts
from hocket.kernels.containers import table
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.simulate.pipeline_tables import ActionTable, PipelineProgress, StageTable, new_progress
from hocket.simulate.timeline import Timeline

WORK_LETTERS = "FBIW"
"""One letter per `StageWork`, in which actions are named: ``2F0`` is stage 2, microbatch 0."""


def simulate_pipeline(schedule: Schedule, costs: StageCosts) -> Timeline:
    """What carrying out ``schedule`` would be like: its actions, then what follows on each device.

    The instance of an action is its microbatch, and it does work ``work * stages + stage``. Memory
    is told by the peaks alone.

    Raises `UsageError` where costs are of other stages, `CheckError` where actions wait for each
    other in a circle.
    """
    check_costs(costs, schedule.num_stages, schedule.num_devices)
    actions, stages = action_table(schedule), stage_table(costs)
    progress = new_progress(actions, schedule.num_stages * schedule.num_microbatches)

    from hocket.simulate.pipeline_kernel import run

    if run(actions, stages, progress, schedule.num_microbatches) < len(schedule.work):
        raise deadlock(schedule, progress.cursor)
    return _timeline(schedule, progress, costs)


def _timeline(schedule: Schedule, progress: PipelineProgress, costs: StageCosts) -> Timeline:
    num_devices, num_actions = schedule.num_devices, len(schedule.work)
    after_start_s = progress.free_s
    end_s = np.concatenate((progress.end_s, after_start_s + np.array(costs.after_s)))
    num_works = num_actions + num_devices
    every = np.arange(num_devices)
    work = schedule.work.astype(np.int64) * schedule.num_stages + schedule.stage
    start_s = np.concatenate((progress.start_s, after_start_s))
    return Timeline(
        makespan_s=float(end_s.max(initial=0.0)),
        num_works=num_works,
        device=np.append(np.repeat(every, np.diff(schedule.start)), every).astype(np.int32),
        stream=np.zeros(num_works, dtype=np.int8),
        what=np.append(work, len(StageWork) * schedule.num_stages + every).astype(np.int32),
        instance=np.append(schedule.microbatch, np.zeros(num_devices)).astype(np.int32),
        src=np.full(num_works, -1, dtype=np.int32),
        ready_s=start_s,
        start_s=start_s,
        end_s=end_s,
        memory_ptr=np.zeros(num_devices + 1, dtype=np.int64),
        memory_time_s=np.zeros(0),
        memory_bytes=np.zeros(0, dtype=np.int64),
        peak_bytes=progress.peak_bytes + np.array(costs.state_bytes, dtype=np.int64),
    )


def after_s(timeline: Timeline) -> FloatArray:
    """Per device of a simulated pipeline: how long what follows its last action takes."""
    last = slice(timeline.num_works - timeline.num_devices, timeline.num_works)
    return timeline.end_s[last] - timeline.start_s[last]


def action_busy_s(timeline: Timeline) -> FloatArray:
    """Per device of a pipeline: how long its actions take, without what follows them."""
    return timeline.busy_s - after_s(timeline)


def check_costs(costs: StageCosts, num_stages: int, num_devices: int) -> None:
    """Raise `UsageError` unless the costs are of so many stages and devices, and make sense."""
    stages = (
        costs.forward_s, costs.input_gradient_s, costs.weight_gradient_s, costs.activation_bytes,
        costs.weight_gradient_bytes, (*costs.send_s, 0.0),
    )  # fmt: skip
    devices = (costs.state_bytes, costs.after_s)
    if any(len(row) != num_stages for row in stages):
        raise UsageError(f"the costs are not those of the schedule's {num_stages} stages")
    if any(len(row) != num_devices for row in devices):
        raise UsageError(f"the costs are not those of the schedule's {num_devices} devices")
    values = np.concatenate([np.asarray(row, dtype=np.float64) for row in (*stages, *devices)])
    if not np.all(np.isfinite(values) & (values >= 0)):
        raise UsageError("the costs of a stage or a device are negative or not finite")
    if np.any(np.subtract(costs.weight_gradient_bytes, costs.activation_bytes) > 0):
        raise UsageError("a stage keeps more for the gradient of its weights than it holds at all")


def action_table(schedule: Schedule) -> ActionTable:
    """The schedule for compiled code."""
    return ActionTable(
        start=table(schedule.start, np.int32),
        work=table(schedule.work, np.int32),
        stage=table(schedule.stage, np.int32),
        microbatch=table(schedule.microbatch, np.int32),
        device_of_stage=table(schedule.device_of_stage, np.int32),
    )


def stage_table(costs: StageCosts) -> StageTable:
    """The costs for compiled code; see `StageTable`."""
    forward_s = np.array(costs.forward_s, dtype=np.float64)
    input_s = np.array(costs.input_gradient_s, dtype=np.float64)
    weight_s = np.array(costs.weight_gradient_s, dtype=np.float64)
    held = np.array(costs.activation_bytes, dtype=np.int64)
    late = np.array(costs.weight_gradient_bytes, dtype=np.int64)
    return StageTable(
        duration_s=table(np.stack([forward_s, input_s + weight_s, input_s, weight_s]), np.float64),
        change_bytes=table(np.stack([held, -held, late - held, -late]), np.int64),
        send_s=table((*costs.send_s, 0.0), np.float64),
    )


def action_name(schedule: Schedule, action: int) -> str:
    """An action as people write it: ``2F0`` is the forward of stage 2 for microbatch 0."""
    letter = WORK_LETTERS[schedule.work[action]]
    return f"{schedule.stage[action]}{letter}{schedule.microbatch[action]}"


def deadlock(schedule: Schedule, cursor: NDArray[np.int64]) -> CheckError:
    """The error for a schedule that stopped with each device at ``cursor``."""
    stuck = np.flatnonzero(cursor < schedule.start[1:])
    device = int(stuck[0])
    action = int(cursor[device])
    stage, microbatch = int(schedule.stage[action]), int(schedule.microbatch[action])
    work = StageWork(int(schedule.work[action]))
    if work == StageWork.FORWARD:
        needed = f"the forward of stage {stage - 1}"
    elif work == StageWork.WEIGHT_GRADIENT:
        needed = f"the gradient of the inputs of stage {stage}"
    else:
        needed = f"the forward of stage {stage} and the backward of stage {stage + 1}"
    return CheckError(
        f"action {action_name(schedule, action)} can never start on device {device}: {needed} "
        f"for microbatch {microbatch} in turn waits for it, or is missing",
        hint="order the actions of each device so that none waits for a later one",
        where=f"schedule {schedule.name!r}",
    )
