"""Times of the stages of a pipeline with evenly split layers, for one microbatch.

The most loaded device sets the pace of the pipeline; the sum over all devices is the time that the
first and the last microbatch take to pass. If the layers are not a multiple of the stages, stages
in the middle get one more than those at the ends, which also have the embedding or the output
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.cost.parallel.layer import LayerSlices, LayerTimes, boundary_s, layer_times
from hocket.cost.parallel.setting import Setting

FLUSH, ZB_H1, ZB_H2, ZB_V, DUALPIPE_V, SCARCE = range(6)
"""Patterns of filling and draining a pipeline: `StageTimes.fill_s` has a row for each. With too few
microbatches all but ``FLUSH`` approach ``SCARCE``."""
PATTERN = {"zb-h1": ZB_H1, "zb-h2": ZB_H2, "zb-v": ZB_V, "dualpipe-v": DUALPIPE_V}
"""Pattern of each schedule that splits the backward pass; the others have ``FLUSH``."""
DEPTH = (0.0, 1.0, 2.0, 2.0, 2.0)
"""Microbatches per pipeline rank from which each pattern reaches its own fill time."""
GATHERED = 3
"""ZeRO stage that gathers weights for every pass."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StageTimes:
    """Seconds per microbatch, one entry per combination of stage fields."""

    layer: LayerTimes
    """Times of a layer, the embedding and the output layer."""
    busy_s: FloatArray
    """Seconds of the most loaded device, without transfers between stages."""
    tensor_s: FloatArray
    """Part of ``busy_s`` spent in tensor-parallel collectives."""
    other_s: FloatArray
    """Part of ``busy_s`` spent in traffic of context and expert parallelism."""
    exchange_s: FloatArray
    """Seconds per chunk of transfers to and from the next stage, averaged over the ranks."""
    fill_s: FloatArray
    """[pattern, stage]: seconds per step that the most loaded device waits for the fill."""


def ends_and_middle(layers: FloatArray, pipeline: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Layers of the first and last stage, and of each stage between (all layers for one stage)."""
    share, rest = np.floor(layers / pipeline), layers % pipeline
    middle = share + (rest > 0)
    return np.where(rest <= pipeline - 2, share, middle), middle


def stage_times(
    setting: Setting,
    slices: LayerSlices,
    pipeline: FloatArray,
    crosses_hosts: FloatArray,
) -> StageTimes:
    """Times of pipelines of ``pipeline`` even stages."""
    times = layer_times(setting, slices)
    ends, middle = ends_and_middle(setting.layers, pipeline)
    first = times.embedding_s
    last = times.logits_s + times.logits_backward_s
    longest, layers = _longest(times, pipeline, ends, middle)
    constant_s = CONSTANTS.microbatch_s
    # Each device boundary adds the host's constant time once.
    total_s = setting.layers * times.total_s + first + last + (pipeline - 1) * constant_s
    send_s = boundary_s(setting, slices, crosses_hosts) * (pipeline > 1)
    fill_s = _fill_s(times, setting, pipeline, total_s - longest) + 2 * (pipeline - 1) * send_s
    return StageTimes(
        layer=times,
        busy_s=longest + constant_s,
        tensor_s=layers * times.tensor_s,
        other_s=layers * times.other_s,
        exchange_s=2 * send_s * (pipeline - 1) / pipeline,
        fill_s=fill_s,
    )


def _longest(
    times: LayerTimes, pipeline: FloatArray, ends: FloatArray, middle: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds and number of layers of the most loaded device."""
    last = times.logits_s + times.logits_backward_s
    at_end = ends * times.total_s + np.maximum(times.embedding_s, last)
    between = np.where(pipeline > 2, middle * times.total_s, 0.0)
    alone = ends * times.total_s + times.embedding_s + last
    longest = np.where(pipeline == 1, alone, np.maximum(at_end, between))
    layers = np.where(between > at_end, middle, ends)
    return longest, layers


def _fill_s(
    times: LayerTimes, setting: Setting, pipeline: FloatArray, others_s: FloatArray
) -> FloatArray:
    """[pattern, stage]: seconds that the most loaded device waits before its first and after its
    last op.

    ``FLUSH`` is the time of one microbatch on all other devices. A split backward pass fills the
    wait with weight gradients (Qi et al.). The rest of the time until the last device starts cannot
    be filled, since the optimizer waits for all devices.
    """
    share = setting.layers / pipeline
    forward = share * times.forward_s
    back, weight = share * times.input_gradient_s, share * times.weight_gradient_s
    waits = pipeline - 1
    uneven = _uneven_s(times, setting, pipeline)
    # All patterns need one shape to be stacked.
    flush = np.broadcast_to(others_s, forward.shape)
    return np.stack(
        [
            flush,
            waits * np.maximum(forward + back - weight, forward),
            waits * np.maximum(forward + back - 2 * weight, forward),
            waits * (forward / 2 + uneven / 4),
            waits * (forward / 2 + uneven / 2),
            waits * (forward + back),
        ]
    )


def _uneven_s(times: LayerTimes, setting: Setting, pipeline: FloatArray) -> FloatArray:
    """Seconds by which a stage's input gradients take longer than its weight gradients.

    V-shaped schedules are designed for equal times, which recomputation makes unequal. The factors
    on this difference in `_fill_s` were fitted to simulated pipelines of 4 to 16 stages.
    """
    share = setting.layers / pipeline
    return share * np.maximum(times.input_gradient_s - times.weight_gradient_s, 0.0)
