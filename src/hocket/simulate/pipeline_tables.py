"""The arrays on which the pipeline simulator's compiled code works."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray


class ActionTable(NamedTuple):
    """A schedule: the actions of device i are those from ``start[i]`` to ``start[i + 1]``."""

    start: IntArray
    work: IntArray
    stage: IntArray
    microbatch: IntArray
    device_of_stage: IntArray


class StageTable(NamedTuple):
    """What stages cost."""

    duration_s: FloatArray
    """[work, stage]."""
    change_bytes: LongArray
    """[work, stage]: what an action takes at its start, or, negative, gives back at its end."""
    send_s: FloatArray
    """From each stage to the next."""


class PipelineProgress(NamedTuple):
    """What has happened so far."""

    cursor: LongArray
    """Per device: its next action."""
    pending: LongArray
    """Devices that may have something to do, as a stack; its size stands at the end."""
    is_pending: LongArray
    free_s: FloatArray
    """Per device: end of its last action."""
    held_bytes: LongArray
    peak_bytes: LongArray
    busy_s: FloatArray
    forward_end_s: FloatArray
    """[stage, microbatch] as one row; negative while it has not run."""
    backward_end_s: FloatArray
    """As `forward_end_s`, for the gradient of the inputs, alone or with that of the weights."""
    start_s: FloatArray
    end_s: FloatArray


def new_progress(actions: ActionTable, num_cells: int) -> PipelineProgress:
    """Nothing has happened; ``num_cells`` are stages times microbatches."""
    num_devices, num_actions = len(actions.start) - 1, len(actions.work)
    return PipelineProgress(
        cursor=actions.start[:-1].astype(np.int64),
        pending=np.zeros(num_devices + 1, dtype=np.int64),
        is_pending=np.zeros(num_devices, dtype=np.int64),
        free_s=np.zeros(num_devices),
        held_bytes=np.zeros(num_devices, dtype=np.int64),
        peak_bytes=np.zeros(num_devices, dtype=np.int64),
        busy_s=np.zeros(num_devices),
        forward_end_s=np.full(num_cells, -1.0),
        backward_end_s=np.full(num_cells, -1.0),
        start_s=np.zeros(num_actions),
        end_s=np.zeros(num_actions),
    )
