"""Times of gradients, weights and optimizer: after the last microbatch or overlapping with work.

Data-parallel ranks, including context-parallel ones, which hold the same weights, all-reduce their
gradients once per step. If optimizer state is sharded (ZeRO), gradients are reduce-scattered and
new weights gathered. Sharded gradients (ZeRO 2) are scattered after every microbatch, and sharded
weights (ZeRO 3) are gathered for every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.efficiency import CONSTANTS, memory_s
from hocket.cost.parallel.layer import ACTIVATION_BYTES, expert_parameters, layer_parameters
from hocket.cost.parallel.setting import Setting
from hocket.cost.parallel.stage import ends_and_middle
from hocket.cost.parallel.traffic import RankGroup, all_gather_s, all_reduce_s


@dataclass(frozen=True, eq=False, kw_only=True)
class Degrees:
    """Degrees and ZeRO stage that decide where weights and state are, one entry per combination."""

    tensor: FloatArray
    pipeline: FloatArray
    data: FloatArray
    context: FloatArray
    expert: FloatArray
    zero: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTimes:
    """Seconds of one rank, one entry per combination of `Degrees`."""

    once_s: FloatArray
    """Seconds of the collectives that run once per step and may overlap with work."""
    each_s: FloatArray
    """Seconds per microbatch of collectives and fetched weights that may overlap with its work."""
    ends_s: FloatArray
    """Seconds to all-reduce the gradients of a tied embedding between first and last stage."""
    optimizer_s: FloatArray


def rank_times(setting: Setting, degrees: Degrees) -> RankTimes:
    """Times of every given combination of degrees."""
    common, experts = _parameters(setting, degrees)
    copies = degrees.data * degrees.context
    expert_copies = np.maximum(copies / degrees.expert, 1)
    common_group = RankGroup(copies, degrees.tensor)
    expert_group = RankGroup(expert_copies, degrees.tensor * degrees.expert)
    once = each = own = np.zeros(1)
    for parameters, group in ((common, common_group), (experts, expert_group)):
        shards = np.minimum(group.num_ranks, setting.most_shards)
        part_once, part_each = _collectives_s(
            parameters, RankGroup(shards, group.stride), setting, degrees
        )
        # Ranks that hold the same shard (HSDP) all-reduce its gradients among themselves.
        same = RankGroup(group.num_ranks / shards, group.stride * shards)
        same_s = all_reduce_s(parameters / shards * setting.sent_gradient_bytes, same, setting)
        once = once + part_once + np.where(degrees.zero > 0, same_s, 0.0)
        each = each + part_each
        own = own + parameters / np.where(degrees.zero > 0, shards, 1.0)
    on_host_s, fetched_s = _host_s(own, setting, degrees)
    on_device_s = memory_s(CONSTANTS.optimizer_bytes * own, setting)
    return RankTimes(
        once_s=once,
        each_s=each + fetched_s,
        ends_s=_shared_embedding_s(setting, degrees),
        optimizer_s=np.where(on_host_s > 0, on_host_s, on_device_s) + CONSTANTS.step_s,
    )


def _host_s(own: FloatArray, setting: Setting, degrees: Degrees) -> tuple[FloatArray, FloatArray]:
    """Seconds of offloaded state: once per step, and per microbatch.

    Once per step, gradients are copied to the host and the optimizer runs there. Sharded weights
    are fetched for both passes of every microbatch.
    """
    is_offloaded = (setting.offloads > 0) & (degrees.zero > 0)
    own = np.where(is_offloaded, own, 0.0)
    down_s = setting.gradient_bytes * own / CONSTANTS.host_link_bps
    up_s = ACTIVATION_BYTES * own / CONSTANTS.host_link_bps
    moved_bytes = CONSTANTS.optimizer_bytes * own * setting.devices_per_host
    # Unsharded weights are copied to the device once per step and stay there.
    is_whole = degrees.zero < 3
    once_s = down_s + moved_bytes / CONSTANTS.host_memory_bps + np.where(is_whole, up_s, 0.0)
    return once_s, np.where(is_whole, 0.0, 2 * up_s)


def _parameters(setting: Setting, degrees: Degrees) -> tuple[FloatArray, FloatArray]:
    """Parameters of the fullest device: without routed experts, and of routed experts."""
    ends, middle = ends_and_middle(setting.layers, degrees.pipeline)
    words = setting.vocabulary * setting.hidden / degrees.tensor
    at_ends = np.where((degrees.pipeline == 1) & (setting.is_tied == 0), 2, 1) * words
    # If there are more expert ranks than replicas, experts are sharded over tensor ranks as well.
    expert = np.minimum(degrees.expert, degrees.data * degrees.context)
    every = layer_parameters(setting, degrees.tensor, expert)
    experts = expert_parameters(setting, degrees.tensor, expert)
    is_middle = (degrees.pipeline > 2) & (middle * every > ends * every + at_ends)
    layers = np.where(is_middle, middle, ends)
    return layers * (every - experts) + np.where(is_middle, 0.0, at_ends), layers * experts


def _collectives_s(
    parameters: FloatArray,
    group: RankGroup,
    setting: Setting,
    degrees: Degrees,
) -> tuple[FloatArray, FloatArray]:
    """Seconds per step, and per microbatch, to synchronize parameters that a group replicates."""
    gradient_bytes = parameters * setting.sent_gradient_bytes
    weight_bytes = parameters * ACTIVATION_BYTES
    reduce_s = all_reduce_s(gradient_bytes, group, setting)
    scatter_s = all_gather_s(gradient_bytes, group, setting)
    gather_s = all_gather_s(weight_bytes, group, setting)
    passes_s = 2 * gather_s + scatter_s
    # Tensor by tensor, only one network adapter per host is busy at a time.
    alone_bps = setting.between_bps * CONSTANTS.gather_share / setting.coefficients.network
    slow_s = (2 * weight_bytes + gradient_bytes) / alone_bps * (group.num_ranks > 1)
    is_slow = (setting.gathers_by_tensor > 0) & ~group.is_inside(setting)
    passes_s = np.where(is_slow, slow_s, passes_s)
    zero = degrees.zero
    once = np.select(
        [zero == 0, zero == 1, zero == 2], [reduce_s, scatter_s + gather_s, gather_s], 0.0
    )
    each = np.select([zero == 2, zero == 3], [scatter_s, passes_s], 0.0)
    return once, each


def _shared_embedding_s(setting: Setting, degrees: Degrees) -> FloatArray:
    words = setting.vocabulary * setting.hidden / degrees.tensor
    num_devices = degrees.tensor * degrees.context * degrees.data * degrees.pipeline
    group = RankGroup(np.full_like(num_devices, 2.0), num_devices / 2)
    both_s = all_reduce_s(words * setting.sent_gradient_bytes, group, setting)
    return np.where((degrees.pipeline > 1) & (setting.is_tied > 0), both_s, 0.0)
