"""Simulate a pipeline schedule: times of its actions, and peak memory of its devices.

Devices run their actions in order, each as soon as its inputs have arrived. Transfers between two
devices take a fixed time and do not contend. So times are longest paths, peaks of memory follow
from the order alone, and one pass over the actions is enough. O(actions).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import CheckError, UsageError
from hocket.cost.parallel.costs import StageCosts
from hocket.kernels.containers import table
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.simulate.timeline import Timeline

WORK_LETTERS = "FBIW"
"""Letter of each `StageWork` in names of actions: ``2F0`` is stage 2 forward with microbatch 0."""


class ActionTable(NamedTuple):
    """Arrays of a schedule: device i runs actions ``start[i]`` up to ``start[i + 1]``."""

    start: IntArray
    work: IntArray
    stage: IntArray
    microbatch: IntArray
    device_of_stage: IntArray


def simulate_pipeline(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Return the timeline of ``schedule``: its actions, then the work after them on each device.

    ``instance`` of an action is its microbatch, and ``what`` is ``work * stages + stage``. The
    timeline has memory peaks but no memory curves.

    Raises `UsageError` if the costs are for other stages, `CheckError` if actions wait for each
    other in a cycle.
    """
    from hocket.simulate.pipeline_kernel import run_actions

    check_costs(costs, schedule.num_stages, schedule.num_devices)
    num_actions = len(schedule.work)
    start_s, end_s = np.zeros((2, num_actions))
    cursor = schedule.start[:-1].astype(np.int64)
    columns = (
        schedule.start, schedule.work, schedule.stage, schedule.microbatch, schedule.device_of_stage
    )  # fmt: skip
    actions = ActionTable(*(table(column, np.int32) for column in columns))
    # Ends of the forward and the backward of each stage and microbatch; not a number until known.
    cell_end_s = np.full((2, schedule.num_stages, schedule.num_microbatches), np.nan)
    run_actions(
        actions,
        durations_s(costs),
        table((*costs.send_s, 0.0), np.float64),
        cell_end_s,
        cursor,
        start_s,
        end_s,
    )
    if np.any(cursor < schedule.start[1:]):
        raise _deadlock(schedule, cursor)
    return _timeline(schedule, start_s, end_s, costs)


def durations_s(costs: StageCosts) -> FloatArray:
    """[work, stage]: seconds of one action."""
    input_s, weight_s = np.array(costs.input_gradient_s), np.array(costs.weight_gradient_s)
    return table(np.stack([costs.forward_s, input_s + weight_s, input_s, weight_s]), np.float64)


def _peak_bytes(schedule: Schedule, costs: StageCosts) -> LongArray:
    """Return the peak bytes of each device: its state plus the most activations in flight."""
    held = np.array(costs.activation_bytes, dtype=np.int64)
    late = np.array(costs.weight_gradient_bytes, dtype=np.int64)
    change = np.stack([held, -held, late - held, -late])[schedule.work, schedule.stage]
    rows = zip(schedule.start[:-1].tolist(), schedule.start[1:].tolist(), strict=True)
    most = [int(np.cumsum(change[first:stop]).max(initial=0)) for first, stop in rows]
    return np.array(most, dtype=np.int64) + np.array(costs.state_bytes, dtype=np.int64)


def _timeline(
    schedule: Schedule, start_s: FloatArray, end_s: FloatArray, costs: StageCosts
) -> Timeline:
    num_devices, every = schedule.num_devices, np.arange(schedule.num_devices)
    num_works = len(schedule.work) + num_devices
    # The work that follows begins with the end of a device's last action.
    after_start_s = np.append(end_s, 0.0)[schedule.start[1:] - 1]
    after_start_s[np.diff(schedule.start) == 0] = 0.0
    starts_s = np.concatenate((start_s, after_start_s))
    ends_s = np.concatenate((end_s, after_start_s + np.array(costs.after_s)))
    work = schedule.work.astype(np.int64) * schedule.num_stages + schedule.stage
    return Timeline(
        makespan_s=float(ends_s.max(initial=0.0)),
        num_works=num_works,
        device=np.append(np.repeat(every, np.diff(schedule.start)), every).astype(np.int32),
        stream=np.zeros(num_works, dtype=np.int8),
        what=np.append(work, len(StageWork) * schedule.num_stages + every).astype(np.int32),
        instance=np.append(schedule.microbatch, np.zeros(num_devices)).astype(np.int32),
        src=np.full(num_works, -1, dtype=np.int32),
        ready_s=starts_s,
        start_s=starts_s,
        end_s=ends_s,
        memory_ptr=np.zeros(num_devices + 1, dtype=np.int64),
        memory_time_s=np.zeros(0),
        memory_bytes=np.zeros(0, dtype=np.int64),
        peak_bytes=_peak_bytes(schedule, costs),
    )


def after_s(timeline: Timeline) -> FloatArray:
    """Return, per device of a simulated pipeline, the seconds of the work after its last action."""
    last = slice(timeline.num_works - timeline.num_devices, timeline.num_works)
    return timeline.end_s[last] - timeline.start_s[last]


def action_busy_s(timeline: Timeline) -> FloatArray:
    """Return, per device of a simulated pipeline, the seconds of its actions."""
    return timeline.busy_s - after_s(timeline)


def check_costs(costs: StageCosts, num_stages: int, num_devices: int) -> None:
    """Raise `UsageError` unless the costs match the numbers of stages and devices and are valid."""
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


def action_name(schedule: Schedule, action: int) -> str:
    """Return an action's short name: ``2F0`` is the forward pass of stage 2 for microbatch 0."""
    letter = WORK_LETTERS[schedule.work[action]]
    return f"{schedule.stage[action]}{letter}{schedule.microbatch[action]}"


def _deadlock(schedule: Schedule, cursor: LongArray) -> CheckError:
    """Return the error for a schedule in which each device is stuck at its action ``cursor``."""
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
