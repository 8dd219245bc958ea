"""Times of a layer, the embedding and the output layer for one microbatch on one device.

Layers with and without experts are averaged over the model, so all layers of a model take equally
long. Matrix products, attention, memory-bound ops, collectives of tensor, context and expert
parallelism, recomputation and the host's launches are added up per combination of degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel import efficiency
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.efficiency import attention_s, matrix_s, memory_s, softly_longer
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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pass:
    """Seconds of a layer's forward pass, or of its backward pass without weight gradients."""

    matrix_s: FloatArray
    core_s: FloatArray
    """Seconds of attention's products between tokens, softmax and dropout."""
    around_s: FloatArray
    """Seconds of norms, dropouts and activation functions."""
    tensor_s: FloatArray
    other_s: FloatArray

    @property
    def total_s(self) -> FloatArray:
        return self.matrix_s + self.core_s + self.around_s + self.tensor_s + self.other_s


def layer_times(setting: Setting, slices: LayerSlices, coefficients: Coefficients) -> LayerTimes:
    """Times of a layer for every given combination of degrees and options."""
    matrix = _matrix_s(setting, slices, coefficients)
    forward, backward = _passes(matrix, setting, slices, coefficients)
    # Of an op-by-op selection the products are halved and attention is kept.
    selected = np.select(
        [setting.selects_ops > 0, setting.selects_activations > 0],
        [forward.matrix_s / 2 + forward.around_s, forward.around_s / 2],
        forward.core_s,
    )
    rerun = np.select(
        [slices.recompute == FULL, slices.recompute == SELECTIVE],
        [forward.total_s, selected],
        0.0,
    )
    recomputes_communication = slices.recompute == FULL
    device_s = forward.total_s + backward.total_s + matrix + rerun
    stretch = _stretch(device_s, setting, slices, coefficients)
    parameters = layer_parameters(setting, slices.tensor, slices.expert)
    first_s, logits_s, logits_backward_s = _ends(setting, slices, coefficients)
    return LayerTimes(
        forward_s=stretch * forward.total_s,
        input_gradient_s=stretch * (backward.total_s + rerun),
        weight_gradient_s=stretch * matrix + accumulation_s(parameters, setting, coefficients),
        tensor_s=stretch * (forward.tensor_s * (1 + recomputes_communication) + backward.tensor_s),
        other_s=stretch * (forward.other_s * (1 + recomputes_communication) + backward.other_s),
        embedding_s=first_s,
        logits_s=logits_s,
        logits_backward_s=logits_backward_s,
    )


def layer_parameters(setting: Setting, tensor: FloatArray, expert: FloatArray) -> FloatArray:
    """Parameters of a layer on one device, without norms and biases."""
    attention = 2 * setting.hidden * (setting.query_width + setting.key_width)
    num_matrices = setting.num_wide + 1
    dense = num_matrices * setting.hidden * setting.mlp_width
    shared = num_matrices * setting.hidden * setting.shared_width
    sparse = setting.num_sparse / setting.layers
    common = (attention + (1 - sparse) * dense + sparse * shared) / tensor
    return common + expert_parameters(setting, tensor, expert)


def expert_parameters(setting: Setting, tensor: FloatArray, expert: FloatArray) -> FloatArray:
    """Parameters of a layer's routed experts on one device, averaged over all layers."""
    one = (setting.num_wide + 1) * setting.hidden * setting.expert_width
    sparse = setting.num_sparse / setting.layers
    return sparse * one * setting.expert_count / (tensor * expert)


def accumulation_s(
    parameters: FloatArray, setting: Setting, coefficients: Coefficients
) -> FloatArray:
    """Seconds to add a microbatch's gradients to their sum; 0 if the program fuses this."""
    moved_bytes = (ACTIVATION_BYTES + 2 * setting.gradient_bytes) * parameters
    is_extra = 1 - setting.fuses_accumulation
    return is_extra * coefficients.gradients * memory_s(moved_bytes, setting, coefficients)


def boundary_s(
    setting: Setting, slices: LayerSlices, crosses_hosts: FloatArray, coefficients: Coefficients
) -> FloatArray:
    """Seconds to send one microbatch's activations to the next stage."""
    size_bytes = ACTIVATION_BYTES * _tokens(setting, slices) * setting.hidden
    is_divided = (slices.sequence_parallel > 0) | (setting.scatters > 0)
    parts = np.where(is_divided, slices.tensor, 1.0)
    group = RankGroup(slices.tensor, np.ones_like(slices.tensor))
    gather_s = all_gather_s(size_bytes, group, setting, coefficients)
    needs_whole = (setting.scatters > 0) & (slices.sequence_parallel == 0)
    sent_s = send_s(size_bytes / parts, crosses_hosts, setting, coefficients)
    return sent_s + np.where(needs_whole, gather_s, 0.0)


# ── parts of a layer ─────────────────────────────────────────────────────────────────────────────


def _tokens(setting: Setting, slices: LayerSlices) -> FloatArray:
    return slices.microbatch * setting.sequence / slices.context


def _matrix_s(setting: Setting, slices: LayerSlices, coefficients: Coefficients) -> FloatArray:
    """Forward seconds of products with weights; input and weight gradients each take as long."""
    rows, hidden, tensor = _tokens(setting, slices), setting.hidden, slices.tensor

    def product_s(columns: FloatArray, depth: FloatArray) -> FloatArray:
        return matrix_s(rows, columns, depth, setting, coefficients)

    projections = setting.query_width + 2 * setting.key_width
    attention = product_s(projections / tensor, hidden)
    attention = attention + product_s(hidden, setting.query_width / tensor)
    dense = product_s(setting.num_wide * setting.mlp_width / tensor, hidden)
    dense = dense + product_s(hidden, setting.mlp_width / tensor)
    if not np.any(setting.num_sparse > 0):
        return attention + dense
    sparse = setting.num_sparse / setting.layers
    experts = _experts_s(setting, slices, coefficients)
    return attention + (1 - sparse) * dense + sparse * experts


def _experts_s(setting: Setting, slices: LayerSlices, coefficients: Coefficients) -> FloatArray:
    """Forward seconds of the routed experts, evenly loaded, and of shared experts."""
    rows = _tokens(setting, slices) * np.maximum(setting.expert_active, 1)
    rows_each = rows * slices.expert / setting.expert_count
    width = np.maximum(setting.expert_width, 1) / slices.tensor
    loss = 1 + efficiency.CONSTANTS.expert_rows / rows_each
    routed = matrix_s(rows, setting.num_wide * width, setting.hidden, setting, coefficients)
    routed = loss * (routed + matrix_s(rows, setting.hidden, width, setting, coefficients))
    # With few rows each, reading the weights of all experts at hand takes longer.
    held = expert_parameters(setting, slices.tensor, slices.expert)
    sparse = np.maximum(setting.num_sparse / setting.layers, 1 / setting.layers)
    read_s = memory_s(ACTIVATION_BYTES * held / sparse, setting, coefficients)
    routed = np.maximum(routed, read_s)
    shared_width = np.maximum(setting.shared_width, 1) / slices.tensor
    tokens = _tokens(setting, slices)
    shared = matrix_s(
        tokens, setting.num_wide * shared_width, setting.hidden, setting, coefficients
    ) + matrix_s(tokens, setting.hidden, shared_width, setting, coefficients)
    return routed + np.where(setting.shared_width > 0, shared, 0.0)


def _passes(
    matrix: FloatArray, setting: Setting, slices: LayerSlices, coefficients: Coefficients
) -> tuple[_Pass, _Pass]:
    core, core_backward = _core_s(setting, slices, coefficients)
    moved_bytes = _around_bytes(setting, slices) + _cast_bytes(setting, slices)
    around = memory_s(moved_bytes, setting, coefficients)
    tensor, tensor_backward = _tensor_s(setting, slices, coefficients)
    ring = _ring_s(setting, slices, coefficients)
    # Backward, gradients take the same two all-to-alls in the opposite direction.
    experts = _expert_traffic_s(setting, slices, coefficients)
    hides = setting.overlaps_experts
    forward = _Pass(
        matrix_s=matrix,
        core_s=core,
        around_s=around,
        tensor_s=tensor,
        other_s=_beside(ring, core) + _beside(experts, hides * (matrix + core)),
    )
    backward = _Pass(
        matrix_s=matrix,
        core_s=core_backward,
        around_s=efficiency.CONSTANTS.backward_bytes * around,
        tensor_s=tensor_backward,
        other_s=_beside(2 * ring, core_backward)
        + _beside(experts, hides * (2 * matrix + core_backward)),
    )
    return forward, backward


def _core_s(
    setting: Setting, slices: LayerSlices, coefficients: Coefficients
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of attention's products, and of unfused softmax and dropout."""
    pairs = _tokens(setting, slices) * setting.sequence / slices.tensor
    # Under a causal mask the last of ranks in order has nearly twice the work of all on average.
    uneven = np.where(setting.balances_context > 0, 1.0, (2 * slices.context - 1) / slices.context)
    flops = 4 * pairs * setting.query_width * uneven
    forward, backward = attention_s(flops, setting, coefficients)
    is_written = 1 - setting.is_flash
    fused_bytes, backward_bytes = efficiency.CONSTANTS.score_bytes
    unfused_bytes = efficiency.CONSTANTS.unfused_bytes
    forward_bytes = np.where(_is_unfused(setting, slices), unfused_bytes, fused_bytes)
    scores = is_written * pairs * setting.heads
    return (
        forward + memory_s(forward_bytes * scores, setting, coefficients),
        backward + memory_s(backward_bytes * scores, setting, coefficients),
    )


def _is_unfused(setting: Setting, slices: LayerSlices) -> FloatArray:
    """1 if Megatron's fused softmax does not support this number of score matrices, else 0."""
    matrices = slices.microbatch * setting.heads / slices.tensor
    return np.asarray((1 - setting.is_flash) * (matrices % _FUSED_MATRICES != 0))


def _around_bytes(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Bytes that memory-bound ops move forward.

    These are two norms and two dropouts with residuals (22 bytes per element), the activation
    function, and copies of queries, keys, values and attention's result.
    """
    copies = np.where(slices.sequence_parallel > 0, slices.tensor, 1.0)
    sparse = setting.num_sparse / setting.layers
    routed = setting.expert_active * setting.expert_width
    width = (1 - sparse) * setting.mlp_width + sparse * (routed + setting.shared_width)
    divided = (2 + 2 * setting.num_wide) * width
    divided = divided + 4 * (2 * setting.query_width + 2 * setting.key_width)
    # Norms in 32 bits are six kernels instead of one, and rotations of queries and keys four.
    small = setting.is_eager * 44 * setting.hidden / copies
    rotated = setting.is_eager * 24 * (setting.query_width + setting.key_width)
    gated = setting.is_eager * 4 * width
    # A token's copy for each of its experts is permuted, weighted and permuted back.
    sorted_bytes = sparse * setting.expert_active * 16 * setting.hidden / copies
    return _tokens(setting, slices) * (
        22 * setting.hidden / copies
        + small
        + sorted_bytes
        + (divided + rotated + gated) / slices.tensor
    )


def _cast_bytes(setting: Setting, slices: LayerSlices) -> FloatArray:
    """Bytes moved to cast inputs and weights of products to 8 bits; the backward pass scales
    them."""
    if not np.any(setting.is_float8 > 0):
        return np.zeros(1)
    sparse = setting.num_sparse / setting.layers
    width = (1 - sparse) * setting.mlp_width
    width = width + sparse * (setting.shared_width + setting.expert_active * setting.expert_width)
    routes = 1 + sparse * np.maximum(setting.expert_active - 1, 0)
    inputs = (1 + routes) * setting.hidden + (setting.query_width + width) / slices.tensor
    weights = layer_parameters(setting, slices.tensor, slices.expert)
    elements = _tokens(setting, slices) * inputs + setting.casts_weights * weights
    return setting.is_float8 * setting.cast_bytes * elements


def _tensor_s(
    setting: Setting, slices: LayerSlices, coefficients: Coefficients
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of tensor-parallel collectives.

    Each pass has two all-reduces. With sequence parallelism each is an all-gather and a
    reduce-scatter, and the backward pass has one more all-gather.
    """
    size_bytes = ACTIVATION_BYTES * _tokens(setting, slices) * setting.hidden
    group = RankGroup(slices.tensor, np.ones_like(slices.tensor))
    whole = 2 * all_reduce_s(size_bytes, group, setting, coefficients)
    half = all_gather_s(size_bytes, group, setting, coefficients)
    is_divided = slices.sequence_parallel > 0
    exposed = 1 - setting.overlaps_tensor * efficiency.CONSTANTS.hidden_tensor
    forward, backward = np.where(is_divided, 4 * half, whole), np.where(is_divided, 5 * half, whole)
    return exposed * forward, exposed * backward


def _ring_s(setting: Setting, slices: LayerSlices, coefficients: Coefficients) -> FloatArray:
    """Forward seconds of ring attention, which sends keys and values around all ranks.

    The backward pass takes twice as long, since gradients are sent along.
    """
    size_bytes = 2 * ACTIVATION_BYTES * _tokens(setting, slices) * setting.key_width / slices.tensor
    group = RankGroup(slices.context, slices.tensor)
    # As an all-gather of all blocks: each passes through every rank.
    return all_gather_s(size_bytes * slices.context, group, setting, coefficients)


def _beside(traffic_s: FloatArray, work_s: FloatArray) -> FloatArray:
    """Exposed seconds of traffic that overlaps with ``work_s`` of work."""
    least_s = np.where(work_s > 0, efficiency.CONSTANTS.never_hidden * traffic_s, traffic_s)
    return np.maximum(least_s, traffic_s - work_s)


def _expert_traffic_s(
    setting: Setting, slices: LayerSlices, coefficients: Coefficients
) -> FloatArray:
    """Seconds to send tokens to their experts and the results back, in one pass."""
    sparse = setting.num_sparse / setting.layers
    size_bytes = ACTIVATION_BYTES * _tokens(setting, slices) * setting.hidden
    size_bytes = size_bytes / slices.tensor
    # Experts are whole, on neighbouring ranks.
    group = RankGroup(slices.expert, np.ones_like(slices.tensor))
    sent_s = token_exchange_s(size_bytes, setting.expert_active, group, setting, coefficients)
    return 2 * sparse * sent_s


def _stretch(
    device_s: FloatArray, setting: Setting, slices: LayerSlices, coefficients: Coefficients
) -> FloatArray:
    """Factor by which the host's launches and the gaps between kernels lengthen a layer."""
    constants = efficiency.CONSTANTS
    num_passes = np.select(
        [slices.recompute == FULL, slices.recompute == SELECTIVE], [3.0, 2.3], 2.0
    )
    per_pass = np.where(setting.is_flash > 0, constants.flash_host_s, constants.host_s)
    per_pass = per_pass * (1 + constants.unfused_host * _is_unfused(setting, slices))
    # Ranks of a group that share a host share its CPUs too.
    beside = np.minimum(slices.tensor, setting.devices_per_host) - 1
    per_pass = per_pass * (1 + constants.host_tensor * beside)
    # Saving and restoring the state of random numbers is as much work again for the host.
    num_launched = num_passes + (slices.recompute == FULL)
    # Two products forward, and two for each of their gradients.
    at_hand = setting.num_sparse / setting.layers * setting.expert_count / slices.expert
    sparse = setting.num_sparse / setting.layers
    experts_s = 2 * (num_passes + 1) * constants.expert_launch_s * at_hand
    experts_s = experts_s + num_passes * sparse * setting.routing_host_s
    launches = 1 - setting.replays_graphs
    host_s = launches * coefficients.host * (num_launched * per_pass + experts_s)
    gap_s = np.where(launches > 0, setting.gap_s, np.minimum(setting.gap_s, constants.replay_gap_s))
    gaps_s = coefficients.layer * num_passes * (gap_s + setting.pause_s)
    return (softly_longer(device_s, host_s) + gaps_s) / device_s


def _ends(
    setting: Setting, slices: LayerSlices, coefficients: Coefficients
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of the embedding (both passes), and of the output layer: forward, backward."""
    tokens, hidden = _tokens(setting, slices), setting.hidden
    copies = np.where(slices.sequence_parallel > 0, slices.tensor, 1.0)
    group = RankGroup(slices.tensor, np.ones_like(slices.tensor))
    reduce_s = all_reduce_s(ACTIVATION_BYTES * tokens * hidden, group, setting, coefficients)
    words = setting.vocabulary / slices.tensor
    added_s = accumulation_s(words * hidden, setting, coefficients)
    first = memory_s(10 * tokens * hidden / copies, setting, coefficients) + reduce_s + added_s
    # The output layer stays in 16 bits where the others are computed in 8.
    product = matrix_s(tokens, words, hidden, setting, coefficients, in_16_bits=True)
    # Logits are turned to 32 bits, and the loss passes over them several times.
    constants = efficiency.CONSTANTS
    passes, passes_back = (
        np.where(setting.is_flash > 0, fused, plain)
        for fused, plain in zip(constants.loss_bytes, constants.plain_loss_bytes, strict=True)
    )
    forward = product + memory_s(passes * tokens * words, setting, coefficients)
    backward = 2 * product + memory_s(passes_back * tokens * words, setting, coefficients)
    return first, forward, backward + reduce_s + added_s
