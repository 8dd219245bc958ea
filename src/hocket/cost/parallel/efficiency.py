"""Times of a transformer's kernels: matrix products from their shape, other ops from their bytes.

A large matrix product attains a fixed fraction of the device's peak. A product attains less if its
inner dimension is short, since every tile of the result has a start and an end to pay for, or if
its tiles fill the multiprocessors only a few times, since the last wave leaves some of them idle.
All other ops take the time to move their bytes through device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.matrix_kernels import attention_loss, product_loss
from hocket.cost.parallel.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the formulas, the same for every cluster, from specifications and measurements.

    Constants that differ between architectures are in `hocket.cost.chips`. Those of kernels were
    chosen so that predictions match the published tables of A100 clusters on average. Those of
    collectives reproduce the all-reduce times that vTrain's authors measured with NCCL on 2 to 8
    A100 (1 MiB to 1 GiB).
    """

    expert_rows: float = 64.0
    """Rows wasted per expert by its last, partly filled tile: half of a tile on average."""
    expert_launch_s: float = 9e-6
    """Seconds of the host to launch one product of one expert; a grouped product loops over the
    experts of the device."""
    attention_share: float = 0.75
    """Fraction of the peak attained by plain attention's products with very wide heads."""
    attention_width: float = 52.0
    """Head width at which plain attention attains half of ``attention_share``."""
    unaligned_share: float = 0.037
    """Fraction of the peak of plain attention if the head width is no multiple of eight."""
    memory_share: float = 0.87
    """Fraction of the memory bandwidth that memory-bound ops attain."""
    score_bytes: tuple[float, float] = (13.0, 19.0)
    """Bytes moved per head and pair of tokens by plain attention's softmax and dropout, forward and
    backward."""
    unfused_bytes: float = 33.0
    """Bytes moved per head and pair of tokens forward if softmax is a cast, a scale, a mask, a sum
    and a cast instead of one kernel. Megatron's fused kernel needs heads times sequences to be a
    multiple of four."""
    unfused_host: float = 0.3
    """Fraction by which the unfused softmax lengthens the host's time to launch a pass."""
    loss_bytes: tuple[float, float] = (12.0, 18.0)
    """Bytes moved by the loss per token and vocabulary entry, forward and backward."""
    plain_loss_bytes: tuple[float, float] = (38.0, 14.0)
    """The same for Megatron-LM of 2021 and 2022, as a sum over its kernels
    (``_VocabParallelCrossEntropy``). Forward: cast of the logits to 32 bits 6, maximum 4,
    subtraction 8, exponential 8, sum 4, division 8. Backward: product with the gradient 8, cast to
    16 bits 6."""
    backward_bytes: float = 1.5
    """Bytes moved by the backward of norms, dropouts and activations, relative to their forward."""
    host_s: float = 1.15e-3
    """Seconds of the host to launch one pass over one layer, with plain attention."""
    flash_host_s: float = 0.7e-3
    """Seconds of the host to launch one pass over one layer, with fused attention."""
    host_tensor: float = 0.05
    """Fraction by which each further tensor-parallel rank on the host lengthens a launch."""
    replay_gap_s: float = 40e-6
    """Seconds between the kernels of one pass over one layer in a replayed CUDA graph: about 40
    kernels with a microsecond between two."""
    softness: float = 4.0
    """Sharpness of the smooth maximum of host and device time; infinite for the plain maximum."""
    microbatch_s: float = 0.8e-3
    chunk_s: float = 0.3e-3
    """Seconds of the host for each further chunk of a microbatch: its turn in the schedule, its two
    transfers and the waits for them."""
    step_s: float = 2.5e-3
    optimizer_bytes: float = 33.0
    """Bytes moved per parameter by the optimizer with gradient clipping."""
    start_s: float = 30e-6
    hop_s: float = 6e-6
    """Latency per rank of a collective inside a host, in addition to the link's latency."""
    far_hop_s: float = 10e-6
    """Latency per doubling of the hosts, in addition to the network's; paid there and back."""
    inside_share: float = 0.83
    """Fraction of the link's bandwidth attained by large collectives among many ranks of a host."""
    inside_ranks: float = 0.37
    """Constant c of the factor n / (n + c) on the bandwidth of n ranks inside a host."""
    between_share: float = 0.9
    send_share: float = 0.71
    """Fraction of the network bandwidth attained by transfers between pipeline stages."""
    send_s: float = 50e-6
    hidden_tensor: float = 0.6
    """Fraction of tensor-parallel collectives that is hidden if the program overlaps them."""
    never_hidden: float = 0.1
    """Fraction of a collective or transfer that stays exposed whatever it overlaps with."""
    host_link_bps: float = 24e9
    """Bytes per second between a device and host memory, for offloaded state: PCIe 4.0 x16 as NCCL
    rates it."""
    host_memory_bps: float = 200e9
    """Memory bandwidth of a host, shared by the optimizers of all its devices if state is
    offloaded: eight channels of DDR4-3200 less a few percent."""
    gather_share: float = 0.7
    """Fraction of one adapter's bandwidth attained if weights are gathered tensor by tensor."""


CONSTANTS = Constants()


def matrix_s(
    rows: FloatArray,
    columns: FloatArray,
    depth: FloatArray,
    setting: Setting,
    *,
    in_16_bits: bool = False,
) -> FloatArray:
    """Seconds of the product of matrices ``rows`` x ``depth`` and ``depth`` x ``columns``."""
    # Peak and fraction of the program's dtype, unless the product stays in 16 bits.
    best_flops = setting.token_flops * setting.token_share
    if not in_16_bits:
        best_flops = setting.peak_flops * setting.matrix_share
    best_s = 2 * rows * columns * depth / best_flops
    loss = product_loss(rows * columns, depth, setting.matrix_depth, setting.coefficients.shape)
    return np.asarray(setting.coefficients.matrix * best_s * loss)


def attention_s(flops: FloatArray, setting: Setting) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of attention's products, from the forward ``flops`` without a
    mask.

    Fused attention skips the half of the scores that a causal mask removes, and recomputes the
    scores in its backward pass.
    """
    width = setting.head_width
    plain_share = np.where(
        width % 8 == 0,
        CONSTANTS.attention_share * width / (width + CONSTANTS.attention_width),
        CONSTANTS.unaligned_share / setting.coefficients.unaligned,
    )
    peak_s = setting.coefficients.attention * flops / setting.token_flops
    plain_s = peak_s / plain_share
    slow, slow_back = (
        attention_loss(width, setting.sequence, setting.flash_width_half, half)
        for half in (setting.flash_forward_half, setting.flash_backward_half)
    )
    # A causal mask removes half of the scores.
    flash_s = 0.5 * peak_s * slow / setting.flash_forward
    back_s = 2.5 * 0.5 * peak_s * slow_back / setting.flash_backward
    is_flash = setting.is_flash > 0
    return np.where(is_flash, flash_s, plain_s), np.where(is_flash, back_s, 2 * plain_s)


def memory_s(size_bytes: FloatArray, setting: Setting) -> FloatArray:
    """Seconds to move bytes through the device's memory."""
    return setting.coefficients.memory * size_bytes / (setting.memory_bps * CONSTANTS.memory_share)


def softly_longer(one: FloatArray, other: FloatArray) -> FloatArray:
    """Smooth maximum of two overlapping times: slightly longer than the longer one."""
    power = CONSTANTS.softness
    longer, shorter = np.maximum(one, other), np.minimum(one, other)
    # A p-norm: for very different times the longer one, for equal ones a little more.
    ratio = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    return np.asarray(longer * (1 + ratio**power) ** (1 / power))
