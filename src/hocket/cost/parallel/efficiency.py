"""Times of a transformer's kernels: matrix products by their shape, the rest by bytes.

A matrix product reaches a fixed share of the device's peak when it is large. It loses where the
summed dimension is short, for each tile of the result has a start and an end to pay, and where the
result fills the multiprocessors only a few times, for the last wave leaves some of them idle.
Everything else moves bytes through the device's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.matrix_kernels import attention_loss, product_loss
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants assumed of every cluster: one set, from specifications and public measurements.

    Constants that differ between architectures are in `hocket.cost.chips`. Those of kernels were
    chosen so that the published tables of A100 clusters come out on average;
    those of collectives restate the all-reduce times that vTrain's authors measured with NCCL on
    2 to 8 A100 (1 MiB to 1 GiB).
    """

    expert_rows: float = 64.0
    """Half of the rows of a tile: lost per expert."""
    expert_launch_s: float = 9e-6
    """The host's time to launch one product of one expert: grouped products are loops over the
    experts at hand."""
    attention_share: float = 0.75
    """Of the peak, by products between tokens with very wide heads."""
    attention_width: float = 52.0
    """Head width at which these reach half of that."""
    unaligned_share: float = 0.037
    """Of the peak, where the width of heads is no multiple of eight."""
    memory_share: float = 0.87
    """Of the memory's bandwidth."""
    score_bytes: tuple[float, float] = (13.0, 19.0)
    """Moved per pair of tokens and head, forward and backward, where the matrix is written."""
    unfused_bytes: float = 33.0
    """The same forward, where softmax is not one kernel but a cast, a scale, a mask, a sum and a
    cast: Megatron's kernel takes a number of heads times sequences that four divides."""
    unfused_host: float = 0.3
    """More of the host's time to launch a pass then."""
    loss_bytes: tuple[float, float] = (12.0, 18.0)
    """Moved per token and word by the loss, forward and backward."""
    plain_loss_bytes: tuple[float, float] = (38.0, 14.0)
    """The same in Megatron-LM of 2021 and 2022, kernel by kernel (``_VocabParallelCrossEntropy``):
    logits to 32 bits 6, maximum 4, less it 8, exponent 8, sum 4, divided by it 8; backward, times
    the gradient 8, to 16 bits 6."""
    backward_bytes: float = 1.5
    """Bytes moved by the backward of norms, dropouts and activations, relative to their forward."""
    host_s: float = 1.15e-3
    """The host's time to launch one pass over one layer, with plain attention."""
    flash_host_s: float = 0.7e-3
    """The same with fused kernels."""
    host_tensor: float = 0.05
    """More of it per tensor-parallel rank."""
    replay_gap_s: float = 40e-6
    """Gaps between the kernels of one pass over one layer in a replayed graph: some 40 kernels, and
    a microsecond between two."""
    softness: float = 4.0
    """Sharpness of the smooth maximum of host and device time; infinite for the plain maximum."""
    microbatch_s: float = 0.8e-3
    chunk_s: float = 0.3e-3
    """The host's work for each further chunk of a microbatch: its turn in the schedule, its two
    transfers and their waits."""
    step_s: float = 2.5e-3
    optimizer_bytes: float = 33.0
    """Moved per parameter by the optimizer with gradient clipping."""
    start_s: float = 30e-6
    hop_s: float = 6e-6
    """Per rank of a collective inside a host, with the latency of the link."""
    far_hop_s: float = 10e-6
    """Per doubling of the hosts, with the latency of the network, there and back."""
    inside_share: float = 0.83
    """Of the link's bandwidth, by large collectives among many ranks."""
    inside_ranks: float = 0.37
    """Ranks at which half of that is lost."""
    between_share: float = 0.9
    send_share: float = 0.71
    """Of the bandwidth, by transfers between pipeline stages."""
    send_s: float = 50e-6
    hidden_tensor: float = 0.6
    """Of tensor-parallel collectives, where the program overlaps them."""
    never_hidden: float = 0.1
    """Of data-parallel collectives, whatever they overlap with."""
    host_link_bps: float = 24e9
    """To and from the host's memory, per device, where state stays there: PCIe 4.0 x16 as NCCL
    rates it."""
    host_memory_bps: float = 200e9
    """Of a host's memory, which the optimizers of all its devices then share: eight channels of
    DDR4-3200 less a few percent."""
    gather_share: float = 0.7
    """Of one adapter's bandwidth, where weights are gathered tensor by tensor."""


CONSTANTS = Constants()


def matrix_s(
    rows: FloatArray,
    columns: FloatArray,
    depth: FloatArray,
    setting: Setting,
    coefficients: Coefficients,
    *,
    in_16_bits: bool = False,
) -> FloatArray:
    """Time of a product of a ``rows`` x ``depth`` with a ``depth`` x ``columns`` matrix."""
    best_flops = setting.token_flops * setting.token_share
    if not in_16_bits:
        best_flops = setting.peak_flops * setting.matrix_share
    best_s = 2 * rows * columns * depth / best_flops
    loss = product_loss(rows * columns, depth, setting.matrix_depth, coefficients.shape)
    return np.asarray(coefficients.matrix * best_s * loss)


def attention_s(
    flops: FloatArray, setting: Setting, coefficients: Coefficients
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward time of products between tokens, of ``flops`` forward without a mask.

    Fused attention skips the half that causal masking leaves out, and computes the scores again.
    """
    width = setting.head_width
    plain_share = np.where(
        width % 8 == 0,
        CONSTANTS.attention_share * width / (width + CONSTANTS.attention_width),
        CONSTANTS.unaligned_share / coefficients.unaligned,
    )
    peak_s = coefficients.attention * flops / setting.token_flops
    plain_s = peak_s / plain_share
    slow, slow_back = (
        attention_loss(width, setting.sequence, setting.flash_width_half, half)
        for half in (setting.flash_forward_half, setting.flash_backward_half)
    )
    flash_s = 0.5 * peak_s * slow / setting.flash_forward
    back_s = 2.5 * 0.5 * peak_s * slow_back / setting.flash_backward
    is_flash = setting.is_flash > 0
    return np.where(is_flash, flash_s, plain_s), np.where(is_flash, back_s, 2 * plain_s)


def memory_s(size_bytes: FloatArray, setting: Setting, coefficients: Coefficients) -> FloatArray:
    """Time to move bytes through the device's memory."""
    return coefficients.memory * size_bytes / (setting.memory_bps * CONSTANTS.memory_share)


def softly_longer(one: FloatArray, other: FloatArray) -> FloatArray:
    """Somewhat more than the longer of two times that overlap: neither hides the other fully."""
    power = CONSTANTS.softness
    longer, shorter = np.maximum(one, other), np.minimum(one, other)
    ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    return np.asarray(longer * (1 + ratio**power) ** (1 / power))
