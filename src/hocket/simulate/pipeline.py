"""Simulate a pipeline's schedule: when each action runs, and what each device holds.

Devices do their actions in order, each as soon as what it needs has arrived; transfers between two
devices take their stated time and hinder nothing. So times are longest paths and the peaks of
memory follow from the order alone: one pass over the actions. The same is expressed for the event
engine by `hocket.simulate.pipeline_graph`, with equal results. O(actions).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray
from hocket.errors import CheckError, UsageError
from hocket.kernels.containers import table
from hocket.plan.parallel import StageCosts
from hocket.plan.schedule import Schedule, Work
from hocket.simulate.pipeline_tables import ActionTable, StageTable, new_progress

WORK_LETTERS = "FBIW"
"""One letter per `Work`, in which actions are named: ``2F0`` is stage 2, microbatch 0."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineTimeline:
    """When a pipeline's actions run; arrays over actions are in the schedule's order."""

    schedule: Schedule
    start_s: FloatArray
    end_s: FloatArray
    after_s: FloatArray
    """Per device: what follows its last action."""
    busy_s: FloatArray
    """Per device: time of its actions."""
    peak_bytes: ByteArray
    """Per device: the most that it holds at once, with its state."""

    @cached_property
    def makespan_s(self) -> float:
        """Until every device has done its actions and what follows them."""
        last = np.zeros(self.schedule.num_devices)
        stop = self.schedule.start[1:]
        works = stop > self.schedule.start[:-1]
        last[works] = self.end_s[stop[works] - 1]
        return float((last + self.after_s).max(initial=0.0))

    @property
    def bubble_share(self) -> float:
        """Share of all devices' time in which they wait."""
        total_s = self.schedule.num_devices * self.makespan_s
        return 1 - float((self.busy_s + self.after_s).sum()) / total_s if total_s else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Waiting time of the busiest device over its work: the bubble as papers state it."""
        work_s = float((self.busy_s + self.after_s).max(initial=0.0))
        return (self.makespan_s - work_s) / work_s if work_s else 0.0


def simulate_pipeline(schedule: Schedule, costs: StageCosts) -> PipelineTimeline:
    """What carrying out ``schedule`` would be like.

    Raises `UsageError` where costs are of other stages, `CheckError` where actions wait for each
    other in a circle.
    """
    check_costs(costs, schedule.num_stages, schedule.num_devices)
    actions, stages = action_table(schedule), stage_table(costs)
    progress = new_progress(actions, schedule.num_stages * schedule.num_microbatches)

    from hocket.simulate.pipeline_kernel import run

    if run(actions, stages, progress, schedule.num_microbatches) < len(schedule.work):
        raise deadlock(schedule, progress.cursor)
    return PipelineTimeline(
        schedule=schedule,
        start_s=progress.start_s,
        end_s=progress.end_s,
        after_s=np.array(costs.after_s, dtype=np.float64),
        busy_s=progress.busy_s,
        peak_bytes=progress.peak_bytes + np.array(costs.state_bytes, dtype=np.int64),
    )


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
    work = Work(int(schedule.work[action]))
    if work == Work.FORWARD:
        needed = f"the forward of stage {stage - 1}"
    elif work == Work.WEIGHT_GRADIENT:
        needed = f"the gradient of the inputs of stage {stage}"
    else:
        needed = f"the forward of stage {stage} and the backward of stage {stage + 1}"
    return CheckError(
        f"action {action_name(schedule, action)} can never start on device {device}: {needed} "
        f"for microbatch {microbatch} in turn waits for it, or is missing",
        hint="order the actions of each device so that none waits for a later one",
        where=f"schedule {schedule.name!r}",
    )
