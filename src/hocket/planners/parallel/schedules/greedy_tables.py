"""The arrays on which the list scheduler's compiled code works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.cost.parallel.costs import StageCosts
from hocket.kernels.containers import table
from hocket.planners.parallel.schedules.rows import stages_of_chunks
from hocket.simulate.pipeline import durations_s


class PipelineTable(NamedTuple):
    """A pipeline to schedule."""

    num_microbatches: int
    stage_of: LongArray
    """[device, chunk], in order of the model."""
    device_of_stage: LongArray
    duration_s: FloatArray
    """[work, stage]."""
    send_s: FloatArray
    """From each stage to the next; 0 where both are on one device."""
    held_bytes: LongArray
    """Per stage: what a microbatch takes from its forward on."""
    total_bytes: LongArray
    """Per device: what a microbatch takes on all its stages."""
    late_bytes: LongArray
    """Per stage: what of this is kept until the gradient of the weights."""
    free_bytes: LongArray
    """Per device: memory for activations."""
    after_s: FloatArray


class PolicyTable(NamedTuple):
    """Rules by which the list scheduler chooses the next action."""

    max_in_flight: LongArray
    """Per stage: microbatches after their forward and before their backward."""
    max_late: LongArray
    """Per device: gradients of weights that may wait; beyond it they go first."""
    preference: int
    """Of a forward and a backward that are ready: 0 the forward, 1 the backward, 2 by turns."""
    group: int
    """So many microbatches pass a chunk before the next chunk has its turn."""
    deepest_first: int
    """1 if later chunks go forward first within a group, 0 if earlier ones do."""
    follows: int
    """1 if positions decide instead of preference, group and depth."""
    position: LongArray
    """[forward, input gradient, weight gradient; stage, microbatch]: what is ready and has the
    least goes first."""
    patience: float
    """A device rather waits than begin a gradient of weights if something else arrives within
    this share of its time."""


class GreedyState(NamedTuple):
    """Progress of the list scheduler: the actions scheduled so far."""

    num_done: LongArray
    """[forward, input gradient, weight gradient; stage]: each stage takes microbatches in order."""
    end_s: FloatArray
    """[forward, input gradient; stage, microbatch]."""
    free_s: FloatArray
    """Per device: end of its last action."""
    try_s: FloatArray
    """Per device: when it next looks for something to do."""
    used_bytes: LongArray
    last_work: LongArray
    row_size: LongArray
    rows: NDArray[np.int32]
    """[work, stage, microbatch; device, position]: the actions in order."""


def pipeline_table(
    costs: StageCosts, num_microbatches: int, memory_bytes: Sequence[int], layout: IntArray
) -> PipelineTable:
    """The pipeline of these costs with stages on the devices of ``layout``."""
    held = np.array(costs.activation_bytes, dtype=np.int64)
    stage_of = stages_of_chunks(layout, len(costs.state_bytes))
    is_near = np.append(layout[1:] == layout[:-1], True)
    return PipelineTable(
        num_microbatches=num_microbatches,
        stage_of=table(stage_of, np.int64),
        device_of_stage=table(layout, np.int64),
        duration_s=durations_s(costs),
        send_s=table(np.where(is_near, 0.0, (*costs.send_s, 0.0)), np.float64),
        held_bytes=table(held, np.int64),
        total_bytes=table(held[stage_of].sum(axis=1), np.int64),
        late_bytes=table(costs.weight_gradient_bytes, np.int64),
        free_bytes=table(np.subtract(memory_bytes, costs.state_bytes), np.int64),
        after_s=table(costs.after_s, np.float64),
    )


def new_state(pipeline: PipelineTable) -> GreedyState:
    """Empty scheduler state for the pipeline, with arrays of the needed size."""
    num_devices, chunks = pipeline.stage_of.shape
    num_stages, count = num_devices * chunks, pipeline.num_microbatches
    return GreedyState(
        num_done=np.zeros((3, num_stages), dtype=np.int64),
        end_s=np.zeros((2, num_stages, count)),
        free_s=np.zeros(num_devices),
        try_s=np.zeros(num_devices),
        used_bytes=np.zeros(num_devices, dtype=np.int64),
        last_work=np.zeros(num_devices, dtype=np.int64),
        row_size=np.zeros(num_devices, dtype=np.int64),
        rows=np.zeros((3, num_devices, 3 * chunks * count), dtype=np.int32),
    )
