"""The pipeline simulator, compiled: runs each device until it waits for another one. O(actions)."""

from __future__ import annotations

import math

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.simulate.pipeline import ActionTable

_FORWARD, _WEIGHT_GRADIENT = 0, 3


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
        # Comparisons with what is not a number are false: both must be known.
        ready_s = max(ready_s, arrival_s) if ready_s + arrival_s >= 0.0 else math.nan
    return ready_s


@kernel
def run_actions(
    actions: ActionTable, duration_s: FloatArray, send_s: FloatArray, cell_end_s: FloatArray,
    cursor: LongArray, start_s: FloatArray, end_s: FloatArray,
) -> None:  # fmt: skip
    """Run all actions that can run, and set ``cursor`` to the first that cannot on each device."""
    num_devices, progresses, is_turned = len(cursor), True, False
    while progresses:
        progresses = False
        for index in range(num_devices):
            # Forwards go up the ranks and backwards down: sweeps alternate.
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
