"""Simulate a pipeline schedule: times of its actions, and peak memory of its devices.

Devices run their actions in order, each as soon as its inputs have arrived. Transfers between two
devices take a fixed time and do not contend. So times are longest paths, peaks of memory follow
from the order alone, and one pass over the actions is enough. O(actions), compiled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import CheckError, UsageError
from hocket.cost.parallel.costs import StageCosts
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.sections.schedule import LETTERS, Schedule, StageWork, wrong_actions
from hocket.simulate.timeline import Timeline

_FORWARD, _WEIGHT_GRADIENT = int(StageWork.FORWARD), int(StageWork.WEIGHT_GRADIENT)


class ActionTable(NamedTuple):
    """Arrays of a schedule: device i runs actions ``start[i]`` up to ``start[i + 1]``."""

    start: IntArray
    work: IntArray
    stage: IntArray
    microbatch: IntArray
    device_of_stage: IntArray


def simulate_pipeline(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Return the timeline of ``schedule``: its actions, then the work after them on each device.

    The timeline has memory peaks but no memory curves. Raises `UsageError` if the costs are for
    other stages, `CheckError` if actions wait for each other in a cycle.
    """
    if len(costs.forward_s) != schedule.num_stages or len(costs.after_s) != schedule.num_devices:
        raise UsageError(
            f"the costs are not those of the schedule's {schedule.num_stages} stages on "
            f"{schedule.num_devices} devices"
        )
    start_s, end_s = np.zeros((2, len(schedule.work)))
    cursor = schedule.start[:-1].astype(np.int64)
    actions = ActionTable(*(table(getattr(schedule, name), np.int32)
                            for name in ActionTable._fields))  # fmt: skip
    # Ends of the forward and the backward of each stage and microbatch; NaN until they are known.
    cell_end_s = np.full((2, schedule.num_stages, schedule.num_microbatches), np.nan)
    input_s, weight_s = np.array(costs.input_gradient_s), np.array(costs.weight_gradient_s)
    duration_s = table(
        np.stack([costs.forward_s, input_s + weight_s, input_s, weight_s]), np.float64
    )
    send_s = table((*costs.send_s, 0.0), np.float64)
    _run_actions(actions, duration_s, send_s, cell_end_s, cursor, start_s, end_s)
    # Some device did not reach the end of its actions.
    if np.any(cursor < schedule.start[1:]):
        raise _deadlock(schedule, cursor)
    return _timeline(schedule, start_s, end_s, costs)


def verify_schedule(schedule: Schedule) -> None:
    """Raise `CheckError` on the first error of a schedule: wrong actions, or a deadlock.

    Transfers are sent as soon as their tensor exists and are received in the order in which they
    are sent, so they add no further cycles.
    """
    for violation in wrong_actions(schedule):
        hint, where = "make the schedule again", f"schedule {schedule.name!r}"
        raise CheckError(violation.message, hint=hint, where=where)
    stages, devices = (0,) * schedule.num_stages, (0,) * schedule.num_devices
    simulate_pipeline(schedule, StageCosts(
        forward_s=stages, input_gradient_s=stages, weight_gradient_s=stages, send_s=stages[1:],
        activation_bytes=stages, weight_gradient_bytes=stages, state_bytes=devices,
        after_s=devices,
    ))  # fmt: skip


def after_s(timeline: Timeline) -> FloatArray:
    """Return, per device of a simulated pipeline, the seconds of the work after its last action."""
    return (timeline.op_end_s - timeline.op_start_s)[-timeline.num_devices :]


def action_busy_s(timeline: Timeline) -> FloatArray:
    """Return, per device of a simulated pipeline, the seconds of its actions."""
    return timeline.busy_s - after_s(timeline)


def action_name(schedule: Schedule, action: int) -> str:
    """Return an action's short name: ``2F0`` is the forward pass of stage 2 for microbatch 0."""
    letter = LETTERS[schedule.work[action]]
    return f"{schedule.stage[action]}{letter}{schedule.microbatch[action]}"


def _peak_bytes(schedule: Schedule, costs: StageCosts) -> LongArray:
    """Return the peak bytes of each device: its state plus the most activations in flight."""
    held = np.array(costs.activation_bytes, dtype=np.int64)
    late = np.array(costs.weight_gradient_bytes, dtype=np.int64)
    # A split backward pass frees all but what the weight gradient reads.
    change = np.stack([held, -held, late - held, -late])[schedule.work, schedule.stage]
    most = [int(np.cumsum(own).max(initial=0)) for own in np.split(change, schedule.start[1:-1])]
    return np.array(most, dtype=np.int64) + np.array(costs.state_bytes, dtype=np.int64)


def _timeline(
    schedule: Schedule, start_s: FloatArray, end_s: FloatArray, costs: StageCosts
) -> Timeline:
    every, num_actions = np.arange(schedule.num_devices), np.diff(schedule.start)
    # The work after the pipeline begins when the device's last action ends.
    # The appended 0 is read by devices without actions.
    last_s = np.where(num_actions > 0, np.append(end_s, 0.0)[schedule.start[1:] - 1], 0.0)
    ends_s = np.concatenate((end_s, last_s + np.array(costs.after_s)))
    none, no_time = np.zeros(0, dtype=np.int32), np.zeros(0)
    return Timeline(
        makespan_s=float(ends_s.max(initial=0.0)),
        op_device=np.append(np.repeat(every, num_actions), every).astype(np.int32),
        op_stream=np.zeros(len(ends_s), dtype=np.int8),
        op_start_s=np.concatenate((start_s, last_s)),
        op_end_s=ends_s,
        transfer_tensor=none,
        transfer_src=none,
        transfer_dst=none,
        transfer_ready_s=no_time,
        transfer_start_s=no_time,
        transfer_end_s=no_time,
        memory_ptr=np.zeros(schedule.num_devices + 1, dtype=np.int64),
        memory_time_s=no_time,
        memory_bytes=np.zeros(0, dtype=np.int64),
        peak_bytes=_peak_bytes(schedule, costs),
    )


def _deadlock(schedule: Schedule, cursor: LongArray) -> CheckError:
    """Return the error for a schedule in which each device is stuck at its action ``cursor``."""
    device = int(np.flatnonzero(cursor < schedule.start[1:])[0])
    action = int(cursor[device])
    stage, microbatch = int(schedule.stage[action]), int(schedule.microbatch[action])
    needed = f"the forward of stage {stage} and the backward of stage {stage + 1}"
    if schedule.work[action] == _FORWARD:
        needed = f"the forward of stage {stage - 1}"
    elif schedule.work[action] == _WEIGHT_GRADIENT:
        needed = f"the gradient of the inputs of stage {stage}"
    return CheckError(
        f"action {action_name(schedule, action)} can never start on device {device}: it waits for "
        f"{needed} for microbatch {microbatch}, which is missing or waits for this action",
        hint="order the actions of each device so that none waits for a later one",
        where=f"schedule {schedule.name!r}",
    )


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────


@kernel
def _ready_s(actions: ActionTable, at: int, send_s: FloatArray, end_s: FloatArray) -> float:
    """Return the time at which the inputs of an action have arrived; NaN if it is not known yet."""
    stage, microbatch = actions.stage[at], actions.microbatch[at]
    if actions.work[at] == _WEIGHT_GRADIENT:
        split_s: float = end_s[1, stage, microbatch]
        return split_s
    is_forward = actions.work[at] == _FORWARD
    ready_s: float = 0.0 if is_forward else end_s[0, stage, microbatch]
    other = stage - 1 if is_forward else stage + 1
    if 0 <= other < len(actions.device_of_stage):
        arrival_s = end_s[0 if is_forward else 1, other, microbatch]
        if actions.device_of_stage[other] != actions.device_of_stage[stage]:
            arrival_s += send_s[min(other, stage)]
        # Both times must be known; a comparison with NaN is false.
        ready_s = max(ready_s, arrival_s) if ready_s + arrival_s >= 0.0 else math.nan
    return ready_s


@kernel
def _run_actions(
    actions: ActionTable, duration_s: FloatArray, send_s: FloatArray, cell_end_s: FloatArray,
    cursor: LongArray, start_s: FloatArray, end_s: FloatArray,
) -> None:  # fmt: skip
    """Run all actions that can run, and set ``cursor`` to the first that cannot on each device.

    ``duration_s`` is [work, stage], ``cell_end_s`` [forward or backward, stage, microbatch].
    """
    num_devices, progresses, is_turned = len(cursor), True, False
    while progresses:
        progresses = False
        for index in range(num_devices):
            # Forward passes go up the ranks and backward passes down, so sweeps alternate.
            device = num_devices - 1 - index if is_turned else index
            free_s = end_s[cursor[device] - 1] if cursor[device] > actions.start[device] else 0.0
            while cursor[device] < actions.start[device + 1]:
                at = cursor[device]
                ready_s = _ready_s(actions, at, send_s, cell_end_s)
                if math.isnan(ready_s):
                    break
                work, stage = actions.work[at], actions.stage[at]
                start_s[at] = max(free_s, ready_s)
                free_s = end_s[at] = start_s[at] + duration_s[work, stage]
                if work != _WEIGHT_GRADIENT:
                    cell_end_s[min(work, 1), stage, actions.microbatch[at]] = free_s
                cursor[device] += 1
                progresses = True
        is_turned = not is_turned
