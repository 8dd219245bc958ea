"""Times of the stages of a pipeline with evenly divided layers for one microbatch.

The most loaded device sets the pace of the pipeline; the sum over all of them is what the first
and the last microbatch take to pass. Where layers do not divide evenly, the stages in the middle
have one more than those at the ends, which have the embedding and the output layer besides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.layer import LayerSlices, LayerTimes, boundary_s, layer_times
from hocket.cost.parallel.setting import Setting

FLUSH, ZB_H1, ZB_H2, ZB_V, DUALPIPE_V, V_HALF, SCARCE = range(7)
"""Patterns of filling and draining a pipeline: `StageTimes.fill_s` has a row for each. With few
microbatches all but ``FLUSH`` become ``SCARCE``."""
DEPTH = (0.0, 1.0, 2.0, 2.0, 2.0, 1.0)
"""Microbatches per stage from which each pattern reaches its own fill."""
GATHERED = 3
"""The ZeRO stage that gathers weights for every pass."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StageTimes:
    """Seconds per microbatch, one entry per distinct stage."""

    busy_s: FloatArray
    """The most loaded device, transfers between stages left out."""
    tensor_s: FloatArray
    """Of these: collectives of tensor-parallel ranks."""
    other_s: FloatArray
    """Of these: traffic of context and expert parallelism."""
    exchange_s: FloatArray
    """Both directions to the next stage, per chunk, as the pipeline waits for them."""
    fill_s: FloatArray
    """[pattern, stage]: waiting of the most loaded device in a whole step."""
    lag_s: FloatArray
    """Waiting per microbatch where memory for half of them is kept (`V_HALF`)."""


def ends_and_middle(layers: FloatArray, pipeline: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Layers of the first and last stage, and of those between; all of them for one stage."""
    share, rest = np.floor(layers / pipeline), layers % pipeline
    middle = share + (rest > 0)
    return np.where(rest <= pipeline - 2, share, middle), middle


def stage_times(
    setting: Setting,
    slices: LayerSlices,
    pipeline: FloatArray,
    crosses_hosts: FloatArray,
    coefficients: Coefficients,
) -> StageTimes:
    """The times of pipelines of ``pipeline`` stages made of the given slices of layers."""
    times = layer_times(setting, slices, coefficients)
    ends, middle = ends_and_middle(setting.layers, pipeline)
    first = times.embedding_s
    last = times.logits_s + times.logits_backward_s
    longest, layers = _longest(times, pipeline, ends, middle)
    constant_s = efficiency.CONSTANTS.microbatch_s
    total_s = setting.layers * times.total_s + first + last + (pipeline - 1) * constant_s
    send_s = boundary_s(setting, slices, crosses_hosts, coefficients) * (pipeline > 1)
    fill_s = _fill_s(times, setting, pipeline, total_s - longest) + 2 * (pipeline - 1) * send_s
    return StageTimes(
        busy_s=longest + constant_s,
        tensor_s=layers * times.tensor_s,
        other_s=layers * times.other_s,
        exchange_s=2 * send_s * (pipeline - 1) / pipeline,
        fill_s=fill_s,
        lag_s=_uneven_s(times, setting, pipeline) / 2 * (pipeline > 1),
    )


def _longest(
    times: LayerTimes, pipeline: FloatArray, ends: FloatArray, middle: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Time and layers of the most loaded device."""
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
    """[pattern, stage]: waiting of the most loaded device before its first and after its last work.

    ``FLUSH`` is the time of one microbatch on all other devices. Split backward passes put weight
    gradients into the wait (Qi et al.), but what remains until the last device starts cannot be
    filled, since the optimizer waits for all.
    """
    share = setting.layers / pipeline
    forward = share * times.forward_s
    back, weight = share * times.input_gradient_s, share * times.weight_gradient_s
    waits = pipeline - 1
    uneven = _uneven_s(times, setting, pipeline)
    flush = np.broadcast_to(others_s, forward.shape)
    return np.stack(
        [
            flush,
            waits * np.maximum(forward + back - weight, forward),
            waits * np.maximum(forward + back - 2 * weight, forward),
            waits * (forward / 2 + uneven / 4),
            waits * (forward / 2 + uneven / 2),
            flush / 2 + waits * 0.75 * uneven,
            waits * (forward + back),
        ]
    )


def _uneven_s(times: LayerTimes, setting: Setting, pipeline: FloatArray) -> FloatArray:
    """Time by which the gradient of a stage's inputs exceeds that of its weights.

    V-shaped schedules are designed for equal times; recomputation makes them unequal. The cost of
    that was read off simulated pipelines of 4 to 16 stages.
    """
    share = setting.layers / pipeline
    return share * np.maximum(times.input_gradient_s - times.weight_gradient_s, 0.0)
