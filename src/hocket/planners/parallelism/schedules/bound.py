"""How long a pipeline takes at least, whatever its schedule.

A device cannot start before the first microbatch has come to it, then has all its own work to do;
and the last backward on it still has to go back to the first stage. A microbatch stays on a stage
at least as long as it takes to the end of the model and back, so the bytes it holds over that time
must fit into the device's memory times the makespan. O(stages).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.planners.parallelism.schedules.greedy_tables import PipelineTable


def lower_bound_s(pipeline: PipelineTable, *, split_backward: bool) -> float:
    """No schedule of the pipeline is shorter."""
    forward_s, whole_s, input_s, weight_s = pipeline.duration_s
    back_s = input_s if split_backward else whole_s
    after_first_s = float(pipeline.after_s[pipeline.device_of_stage[0]])
    last_s = (float(weight_s[0]) if split_backward else 0.0) + after_first_s
    sends_s = pipeline.send_s[:-1]
    head_s = np.concatenate(([0.0], np.cumsum(forward_s[:-1] + sends_s)))
    tail_s = np.concatenate(([0.0], np.cumsum(back_s[:-1] + sends_s))) + last_s
    own, first, count = pipeline.stage_of, pipeline.stage_of[:, 0], pipeline.num_microbatches
    all_s = count * (forward_s + whole_s)[own].sum(axis=1)
    path_s = count * (forward_s + back_s)[own].sum(axis=1)
    trips_s = round_trips_s(pipeline, split_backward=split_backward)
    held_byte_s = count * (pipeline.held_bytes * trips_s)[own].sum(axis=1)
    held_s = held_byte_s / np.maximum(pipeline.room_bytes, 1)
    ends_s = head_s[first] + np.maximum(path_s, held_s) + tail_s[first]
    one_s = trips_s[0] + last_s
    return float(max(np.max(head_s[first] + all_s + pipeline.after_s), np.max(ends_s), one_s))


def round_trips_s(pipeline: PipelineTable, *, split_backward: bool) -> FloatArray:
    """Per stage: time from the start of a forward to the end of its backward, nobody waiting."""
    there_s = pipeline.duration_s[0] + pipeline.duration_s[2 if split_backward else 1]
    sends_s = np.append(2 * pipeline.send_s[:-1], 0.0)
    return np.cumsum((there_s + sends_s)[::-1])[::-1]
