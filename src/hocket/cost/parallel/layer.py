"""Times of a layer, the embedding and the output layer for one microbatch on one device.

Layers with and without experts are averaged over the model, so all layers of a model take equally
long. Matrix products, attention, memory-bound ops, collectives of tensor, context and expert
parallelism, recomputation and the host's launches are added up per combination of degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.efficiency import (
    CONSTANTS,
    attention_s,
    matrix_s,
    memory_s,
    softly_longer,
)
from hocket.cost.parallel.setting import Setting
from hocket.cost.parallel.traffic import (
    RankGroup,
    all_gather_s,
    all_reduce_s,
    send_s,
    token_exchange_s,
)
from hocket.transformer import RECOMPUTES

ACTIVATION_BYTES = 2
"""Bytes per element of activations and weights that are sent or moved."""
_FUSED_MATRICES = 4
"""Number of score matrices that Megatron's fused softmax kernel processes at a time."""
FULL, SELECTIVE = RECOMPUTES.index("full"), RECOMPUTES.index("selective")


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerSlices:
    """Parallel degrees and options that a layer's time depends on, one entry per combination."""

    tensor: FloatArray
    context: FloatArray
    expert: FloatArray
    microbatch: FloatArray
    recompute: FloatArray
    sequence_parallel: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerTimes:
    """Seconds per microbatch; a full backward pass is ``input_gradient_s + weight_gradient_s``."""

    forward_s: FloatArray
    input_gradient_s: FloatArray
    """Seconds for the gradients of the layer's inputs, including recomputation."""
    weight_gradient_s: FloatArray
    """Seconds for the gradients of the weights, including their sum over microbatches."""
    tensor_s: FloatArray
    """Part of the forward and backward time spent in tensor-parallel collectives."""
    other_s: FloatArray
    """Part of the forward and backward time spent in traffic of context and expert parallelism."""
    embedding_s: FloatArray
    """Forward and backward seconds of the embedding, on the first stage."""
    logits_s: FloatArray
    """Forward seconds of the output layer and the loss, on the last stage."""
    logits_backward_s: FloatArray

    @property
    def total_s(self) -> FloatArray:
        """Forward and backward seconds of a layer."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


def layer_times(setting: Setting, slices: LayerSlices) -> LayerTimes:
    """Times of a layer for every given combination of degrees and options."""
    matrix = _matrix_s(setting, slices)
    core, core_back = _core_s(setting, slices)
    around = memory_s(_around_bytes(setting, slices) + _cast_bytes(setting, slices), setting)
    tensor, tensor_back = _tensor_s(setting, slices)
    ring = _ring_s(setting, slices)
    # In the backward pass, gradients take the same two all-to-alls in the opposite direction.
    experts, hides = _expert_traffic_s(setting, slices), setting.overlaps_experts
    other = _exposed_s(ring, core) + _exposed_s(experts, hides * (matrix + core))
    other_back = _exposed_s(2 * ring, core_back)
    other_back = other_back + _exposed_s(experts, hides * (2 * matrix + core_back))
    forward = matrix + core + around + tensor + other
    backward = matrix + core_back + CONSTANTS.backward_bytes * around + tensor_back + other_back
    # An op-by-op selection recomputes half of the products and keeps attention.
    selected = np.select(
        [setting.selects_ops > 0, setting.selects_activations > 0],
        [matrix / 2 + around, around / 2],
        core,
    )
    is_full = slices.recompute == FULL
    rerun = np.select([is_full, slices.recompute == SELECTIVE], [forward, selected], 0.0)
    stretch = _stretch(forward + backward + matrix + rerun, setting, slices)
    parameters = layer_parameters(setting, slices.tensor, slices.expert)
    embedding_s, logits_s, logits_backward_s = _ends(setting, slices)
    return LayerTimes(
        forward_s=stretch * forward,
        input_gradient_s=stretch * (backward + rerun),
        weight_gradient_s=stretch * matrix + accumulation_s(parameters, setting),
        tensor_s=stretch * (tensor * (1 + is_full) + tensor_back),
        other_s=stretch * (other * (1 + is_full) + other_back),
        embedding_s=embedding_s,
        logits_s=logits_s,
        logits_backward_s=logits_backward_s,
    )


def layer_parameters(setting: Setting, tensor: FloatArray, expert: FloatArray) -> FloatArray:
    """Parameters of a layer on one device, without norms and biases."""
    heads = setting.query_rank * setting.query_width + setting.key_rank * setting.up_width
    heads = heads + setting.hidden * setting.output_width
    sparse = setting.sparse_share
    width = (1 - sparse) * setting.mlp_width + sparse * setting.shared_width
    mlp = (setting.num_wide + 1) * setting.hidden * width
    # Every rank holds the projections into latent spaces.
    common = setting.hidden * setting.latent_width + (heads + mlp) / tensor
    return common + expert_parameters(setting, tensor, expert)


def expert_parameters(setting: Setting, tensor: FloatArray, expert: FloatArray) -> FloatArray:
    """Parameters of a layer's routed experts on one device, averaged over all layers."""
    one = (setting.num_wide + 1) * setting.hidden * setting.expert_width
    return setting.sparse_share * one * setting.expert_count / (tensor * expert)


def accumulation_s(parameters: FloatArray, setting: Setting) -> FloatArray:
    """Seconds to add a microbatch's gradients to their sum; 0 if the program fuses this."""
    moved_bytes = (ACTIVATION_BYTES + 2 * setting.gradient_bytes) * parameters
    is_extra = 1 - setting.fuses_accumulation
    return is_extra * setting.coefficients.gradients * memory_s(moved_bytes, setting)


def boundary_s(setting: Setting, slices: LayerSlices, crosses_hosts: FloatArray) -> FloatArray:
    """Seconds to send one microbatch's activations to the next stage."""
    size_bytes = _hidden_bytes(setting, slices)
    scatters, is_sharded = setting.scatters_activations > 0, slices.sequence_parallel > 0
    parts = np.where(is_sharded | scatters, slices.tensor, 1.0)
    gather_s = all_gather_s(size_bytes, RankGroup(slices.tensor), setting)
    sent_s = send_s(size_bytes / parts, crosses_hosts, setting)
    return sent_s + np.where(scatters & ~is_sharded, gather_s, 0.0)


# ── parts of a layer ─────────────────────────────────────────────────────────────────────────────


def _tokens(setting: Setting, slices: LayerSlices) -> FloatArray:
    return slices.microbatch * setting.sequence / slices.context


def _hidden_bytes(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Bytes of the hidden states of a microbatch."""
    return ACTIVATION_BYTES * _tokens(setting, slices) * setting.hidden


def _copies(slices: LayerSlices) -> FloatArray:
    """Ranks over which sequence parallelism shards norms, dropout and residuals."""
    return np.where(slices.sequence_parallel > 0, slices.tensor, 1.0)


def _matrix_s(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Forward seconds of products with weights; input and weight gradients each take as long."""
    rows, hidden, tensor = _tokens(setting, slices), setting.hidden, slices.tensor

    def product_s(columns: FloatArray, depth: FloatArray) -> FloatArray:
        return matrix_s(rows, columns, depth, setting)

    queries, keys = setting.query_width / tensor, setting.up_width / tensor
    attention = product_s(queries + keys, hidden)
    if np.any(setting.latent_width > 0):
        latent = product_s(np.maximum(setting.latent_width, 1), hidden)
        latent = latent + product_s(queries, setting.query_rank)
        latent = latent + product_s(keys, setting.key_rank)
        attention = np.where(setting.latent_width > 0, latent, attention)
    attention = attention + product_s(hidden, setting.output_width / tensor)
    dense = product_s(setting.num_wide * setting.mlp_width / tensor, hidden)
    dense = dense + product_s(hidden, setting.mlp_width / tensor)
    if not np.any(setting.sparse_share > 0):
        return attention + dense
    sparse = setting.sparse_share
    return attention + (1 - sparse) * dense + sparse * _experts_s(setting, slices)


def _experts_s(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Forward seconds of the routed experts, evenly loaded, and of shared experts."""

    def mlp_s(rows: FloatArray, width: FloatArray) -> FloatArray:
        own = np.maximum(width, 1) / slices.tensor
        first_s = matrix_s(rows, setting.num_wide * own, setting.hidden, setting)
        return first_s + matrix_s(rows, setting.hidden, own, setting)

    tokens = _tokens(setting, slices)
    rows = tokens * np.maximum(setting.expert_active, 1)
    loss = 1 + CONSTANTS.expert_rows / (rows * slices.expert / setting.expert_count)
    # With few rows per expert, reading the weights of all experts takes longer than their products.
    held = expert_parameters(setting, slices.tensor, slices.expert)
    sparse = np.maximum(setting.sparse_share, 1 / setting.layers)
    read_s = memory_s(ACTIVATION_BYTES * held / sparse, setting)
    routed = np.maximum(loss * mlp_s(rows, setting.expert_width), read_s)
    shared = mlp_s(tokens, setting.shared_width)
    return routed + np.where(setting.shared_width > 0, shared, 0.0)


def _core_s(setting: Setting, slices: LayerSlices) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of attention's products, and of unfused softmax and dropout."""
    pairs = _tokens(setting, slices) * setting.sequence / slices.tensor
    # Without balancing, the last context rank has nearly twice the average work of a causal mask.
    uneven = np.where(setting.balances_context > 0, 1.0, (2 * slices.context - 1) / slices.context)
    flops = 2 * pairs * (setting.query_width + setting.output_width) * uneven
    forward, backward = attention_s(flops, setting)
    fused_bytes, backward_bytes = CONSTANTS.score_bytes
    is_unfused = _is_unfused(setting, slices)
    forward_bytes = np.where(is_unfused, CONSTANTS.unfused_bytes, fused_bytes)
    scores = (1 - setting.is_flash) * pairs * setting.heads
    return (
        forward + memory_s(forward_bytes * scores, setting),
        backward + memory_s(backward_bytes * scores, setting),
    )


def _is_unfused(setting: Setting, slices: LayerSlices) -> FloatArray:
    """1 if Megatron's fused softmax does not support this number of score matrices, else 0."""
    matrices = slices.microbatch * setting.heads / slices.tensor
    return np.asarray((1 - setting.is_flash) * (matrices % _FUSED_MATRICES != 0))


def _around_bytes(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Bytes that memory-bound ops move forward.

    These are two norms and two dropouts with residuals (22 bytes per element), the activation
    function, and copies of queries, keys, values, their latents and attention's result.
    """
    width, keys = _mlp_width(setting), setting.query_width + setting.key_width
    moved = (2 + 2 * setting.num_wide) * width
    moved = moved + 4 * (keys + setting.value_width + setting.output_width)
    # An eager norm in 32 bits is six kernels instead of one, an eager rotation four.
    moved = moved + setting.is_eager * (24 * keys + 4 * width)
    # A token's copy for each of its experts is permuted, weighted and permuted back.
    whole = 22 + 44 * setting.is_eager + 16 * setting.sparse_share * setting.expert_active
    per_token = setting.hidden * whole / _copies(slices) + moved / slices.tensor
    return _tokens(setting, slices) * (per_token + 8 * setting.latent_width)


def _mlp_width(setting: Setting) -> FloatArray:
    """Inner width of all MLPs that a token passes, averaged over the layers."""
    sparse = setting.expert_active * setting.expert_width + setting.shared_width
    return (1 - setting.sparse_share) * setting.mlp_width + setting.sparse_share * sparse


def _cast_bytes(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Bytes moved to cast inputs and weights of products to 8 bits; the backward pass scales
    them."""
    routes = 2 + setting.sparse_share * np.maximum(setting.expert_active - 1, 0)
    inputs = (setting.output_width + _mlp_width(setting)) / slices.tensor
    inputs = inputs + routes * setting.hidden + setting.latent_width
    weights = layer_parameters(setting, slices.tensor, slices.expert)
    elements = _tokens(setting, slices) * inputs + setting.casts_weights * weights
    return setting.is_float8 * setting.cast_bytes * elements


def _tensor_s(setting: Setting, slices: LayerSlices) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of tensor-parallel collectives.

    Each pass has two all-reduces. With sequence parallelism each is an all-gather and a
    reduce-scatter, and the backward pass has one more all-gather.
    """
    size_bytes, group = _hidden_bytes(setting, slices), RankGroup(slices.tensor)
    exposed = 1 - setting.overlaps_tensor * CONSTANTS.hidden_tensor
    reduce_s = exposed * 2 * all_reduce_s(size_bytes, group, setting)
    gather_s = exposed * all_gather_s(size_bytes, group, setting)
    is_sharded = slices.sequence_parallel > 0
    return (
        np.where(is_sharded, 4 * gather_s, reduce_s),
        np.where(is_sharded, 5 * gather_s, reduce_s),
    )


def _ring_s(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Forward seconds of ring attention, which sends keys and values around all ranks.

    The backward pass takes twice as long, since gradients are sent along.
    """
    width = (setting.key_width + setting.value_width) / slices.tensor
    size_bytes = ACTIVATION_BYTES * _tokens(setting, slices) * width
    # Like an all-gather of all blocks, since each block passes through every rank.
    group = RankGroup(slices.context, slices.tensor)
    return all_gather_s(size_bytes * slices.context, group, setting)


def _exposed_s(traffic_s: FloatArray, work_s: FloatArray) -> FloatArray:
    """Exposed seconds of traffic that overlaps with ``work_s`` of work."""
    least_s = np.where(work_s > 0, CONSTANTS.never_hidden * traffic_s, traffic_s)
    return np.maximum(least_s, traffic_s - work_s)


def _expert_traffic_s(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Seconds to send tokens to their experts and the results back, in one pass."""
    size_bytes = _hidden_bytes(setting, slices) / slices.tensor
    # Each expert is on one rank; the ranks of all experts are neighbours.
    group = RankGroup(slices.expert)
    sent_s = token_exchange_s(size_bytes, setting.expert_active, group, setting)
    return 2 * setting.sparse_share * sent_s


def _stretch(device_s: FloatArray, setting: Setting, slices: LayerSlices) -> FloatArray:
    """Factor by which the host's launches and the gaps between kernels lengthen a layer."""
    num_passes = np.select(
        [slices.recompute == FULL, slices.recompute == SELECTIVE], [3.0, 2.3], 2.0
    )
    per_pass = np.where(setting.is_flash > 0, CONSTANTS.flash_host_s, CONSTANTS.host_s)
    per_pass = per_pass * (1 + CONSTANTS.unfused_host * _is_unfused(setting, slices))
    # Ranks on one host share its CPUs, so launches slow each other down.
    beside = np.minimum(slices.tensor, setting.devices_per_host) - 1
    per_pass = per_pass * (1 + CONSTANTS.host_tensor * beside)
    # With full recomputation the host also saves and restores the state of random numbers.
    num_launched = num_passes + (slices.recompute == FULL)
    # Two products forward, and two for each of their gradients.
    launched_s = 2 * (num_passes + 1) * CONSTANTS.expert_launch_s
    experts_s = launched_s * setting.expert_count / slices.expert
    experts_s = setting.sparse_share * (experts_s + num_passes * setting.routing_host_s)
    launches = 1 - setting.replays_graphs
    host_s = launches * setting.coefficients.host * (num_launched * per_pass + experts_s)
    gap_s = np.where(launches > 0, setting.gap_s, np.minimum(setting.gap_s, CONSTANTS.replay_gap_s))
    gaps_s = setting.coefficients.layer * num_passes * (gap_s + setting.pause_s)
    return (softly_longer(device_s, host_s) + gaps_s) / device_s


def _ends(setting: Setting, slices: LayerSlices) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of the embedding (both passes), and of the output layer: forward, backward."""
    tokens, hidden = _tokens(setting, slices), setting.hidden
    reduce_s = all_reduce_s(_hidden_bytes(setting, slices), RankGroup(slices.tensor), setting)
    words = setting.vocabulary / slices.tensor
    added_s = accumulation_s(words * hidden, setting)
    first = memory_s(10 * tokens * hidden / _copies(slices), setting) + reduce_s + added_s
    # The output layer stays in 16 bits even if the others are computed in 8.
    product = matrix_s(tokens, words, hidden, setting, in_16_bits=True)
    # Logits are turned to 32 bits, and the loss passes over them several times.
    passes, passes_back = (
        np.where(setting.is_flash > 0, fused, plain)
        for fused, plain in zip(CONSTANTS.loss_bytes, CONSTANTS.plain_loss_bytes, strict=True)
    )
    forward = product + memory_s(passes * tokens * words, setting)
    backward = 2 * product + memory_s(passes_back * tokens * words, setting)
    return first, forward, backward + reduce_s + added_s
