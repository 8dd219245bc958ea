"""Op families: groups of ops that use a device alike.

An op name is reduced to its base (without namespace, overload, leading and trailing underscores and
``_backward``) and looked up in a table; other names are matched by ordered patterns. O(length of
the name), cached per name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.signatures import tensor_layouts

FAMILIES = (
    "matmul",
    "matmul_unaligned",
    "attention",
    "convolution",
    "normalization",
    "softmax",
    "reduction",
    "scan",
    "elementwise",
    "gather",
    "copy",
    "view",
    "random",
    "optimizer",
    "other",
)
"""All families; ``family_index`` indexes this tuple."""

MATRIX_FAMILIES = ("matmul", "matmul_unaligned", "attention", "convolution")
"""Families whose arithmetic runs on a device's matrix units; the others run on its vector units."""

_NAMES = {
    "matmul": """
        mm bmm addmm addbmm baddbmm matmul linear mv addmv dot vdot addr ger einsum bilinear
        tensordot mkldnn_linear mkldnn_rnn_layer cudnn_rnn grouped_mm scaled_mm
        scaled_grouped_mm int_mm lstm gru rnn fc dense gemm
    """,
    "attention": "attention self_attention multi_head_attention multiheadattention sdpa",
    "convolution": """
        convolution conv1d conv2d conv3d conv convolution_overrideable conv_transpose1d
        conv_transpose2d conv_transpose3d slow_conv2d_forward thnn_conv2d conv_depthwise2d
        conv_depthwise3d mkldnn_convolution cudnn_convolution cudnn_convolution_transpose
        cudnn_convolution_relu
    """,
    "normalization": """
        native_layer_norm layer_norm layernorm native_batch_norm batch_norm batchnorm
        cudnn_batch_norm miopen_batch_norm native_group_norm group_norm groupnorm fused_rms_norm
        rms_norm rmsnorm instance_norm local_response_norm batch_norm_stats batch_norm_elemt
        batch_norm_reduce batch_norm_gather_stats batch_norm_update_stats batch_norm_with_update
        native_batch_norm_legit batch_norm_impl_index weight_norm_interface embedding_renorm
        renorm
    """,
    "softmax": """
        softmax log_softmax softmax_data log_softmax_data masked_softmax safe_softmax logsumexp
        sparse_softmax
    """,
    "reduction": """
        sum mean prod amax amin aminmax max min argmax argmin any all norm linalg_vector_norm
        vector_norm var std var_mean std_mean count_nonzero median mode nansum bincount histc
        nonzero trace dist cdist_forward local_scalar_dense item equal
        is_nonzero sum_to_size foreach_norm max_pool1d max_pool2d max_pool2d_with_indices
        max_pool3d max_pool3d_with_indices maxpool avg_pool1d avg_pool2d avg_pool3d avgpool
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d pool
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits kl_div ctc_loss loss cross_entropy cross_entropy_loss
        searchsorted bucketize segment_reduce multi_margin_loss
    """,
    "scan": """
        cumsum cumprod logcumsumexp cummax cummin sort argsort topk kthvalue unique2 unique
        unique_consecutive
    """,
    "elementwise": """
        add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn exp
        exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan
        atan2 sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lerp addcmul
        addcdiv clamp clamp_min clamp_max clip floor ceil round trunc frac maximum minimum fmax
        fmin relu relu6 leaky_relu gelu silu swish mish elu selu celu glu softplus hardtanh
        hardswish hardsigmoid log_sigmoid log_sigmoid_forward prelu prelu_kernel threshold where
        eq ne lt le gt ge isnan isinf isfinite isposinf isneginf logical_and logical_or
        logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
        bitwise_left_shift bitwise_right_shift masked_fill tril triu nan_to_num native_dropout
        dropout bias_add hypot copysign heaviside logaddexp logaddexp2 sinc signbit polar
        complex thnn_fused_lstm_cell thnn_fused_gru_cell thnn_fused_lstm_cell_impl xlogy
        special_xlogy conj_physical real imag angle foreach_add foreach_mul foreach_div
        foreach_sub amp_foreach_non_finite_check_and_unscale digamma lgamma polygamma i0
        special_entr absolute positive negative multiply divide subtract ldexp
    """,
    "gather": """
        embedding embedding_dense embedding_bag embedding_sparse index index_select index_put
        index_put_impl index_add index_copy index_fill gather scatter scatter_add scatter_reduce
        take take_along_dim put unsafe_index unsafe_index_put unsafe_masked_index
        unsafe_masked_index_put_accumulate masked_select masked_scatter nll_loss
        nll_loss_forward nll_loss2d nll_loss2d_forward one_hot upsample_nearest1d
        upsample_nearest2d upsample_bilinear2d upsample_bicubic2d grid_sampler_2d grid_sampler
        roll flip lookup
    """,
    "copy": """
        copy clone contiguous to to_copy cat concat concatenate stack hstack vstack repeat
        repeat_interleave constant_pad_nd pad reflection_pad2d replication_pad2d fill zero zeros
        ones full zeros_like ones_like full_like new_zeros new_ones new_full arange linspace eye
        scalar_tensor slice_scatter select_scatter as_strided_scatter diagonal_scatter
        slice_backward select_backward diagonal_backward unfold_backward as_strided_backward
        split_backward unbind_backward resize resize_as set_data pin_memory view_copy
        expand_copy permute_copy transpose_copy split_copy split_with_sizes_copy chunk_cat tile
        im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle cast foreach_copy
        foreach_zero lift lift_fresh_copy meshgrid tril_indices triu_indices
    """,
    "view": """
        view unsafe_view reshape reshape_alias t transpose permute expand expand_as slice select
        unsqueeze squeeze detach alias split split_with_sizes chunk unbind as_strided diagonal
        unfold narrow movedim swapaxes lift_fresh view_as view_as_real view_as_complex view_of
        flatten unflatten empty empty_like empty_strided new_empty new_empty_strided
        empty_permuted identity tuple getitem size noop input output conj resolve_conj
        resolve_neg is_same_size sym_size sym_numel sym_stride storage_offset numpy_t mt h ravel
        tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk broadcast_to placeholder
        parameter set assert_async assert_tensor_metadata
    """,
    "random": """
        rand randn randint rand_like randn_like randint_like randperm bernoulli normal uniform
        exponential multinomial poisson normal_functional random geometric cauchy log_normal
        philox_rand rrelu_with_noise
    """,
}
_TABLE = {name: family for family, text in _NAMES.items() for name in text.split()}

# Order matters: the first pattern that is found in the base name decides.
_PATTERNS = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("attention", r"attention|attn|sdpa"),
        ("optimizer", r"adam|sgd|adagrad|lamb|lion|optimi[sz]er"),
        ("convolution", r"conv(?!ert)"),
        ("normalization", r"norm(?!al)"),
        ("softmax", r"softmax"),
        ("matmul", r"matmul|gemm|linear|lstm|gru|_mm$|^mm_|dense|rnn"),
        ("gather", r"embedding|index|scatter|gather|lookup|nll_loss"),
        ("random", r"rand|bernoulli|dropout_mask"),
        ("reduction", r"pool|reduce|loss|sum|mean|argm|entropy"),
        ("view", r"view|reshape|transpose|permute|unsqueeze|squeeze|flatten"),
        ("copy", r"copy|concat|^cat|pad|clone|zeros|ones|fill"),
        ("elementwise", r"relu|gelu|silu|sigmoid|tanh|dropout|add|mul|sub|div|activation|bias"),
    )
)
_HALF = ("bfloat16", "float16")
_ALIGNED_SIDE = 8
"""16-bit elements per load of a matrix unit."""
_NAMESPACES = ("aten", "prims", "prim", "torch", "ops", "nn", "functional", "module", "modules")


@cache
def family_of(kind: str) -> str:
    """Family of an op kind such as ``aten.mm``; ``other`` if nothing matches."""
    named = re.sub(r"^<built-in function (\w+)>$", r"\1", kind.strip())
    parts = [part for part in re.split(r"[.:/ (\[]+", named) if part]
    if parts and parts[0].lower() in ("optimizer", "optim"):
        # Muon's update multiplies matrices; other updates read and write memory.
        return "matmul" if parts[-1].lower() == "muon" else "optimizer"
    while len(parts) > 1 and parts[0].lower() in _NAMESPACES:
        parts = parts[1:]
    name = parts[0] if parts else ""
    base = name.lower().strip("_")
    # Names of module classes in CamelCase are split like function names.
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    for known in (base, _without_endings(base), spaced, _without_endings(spaced)):
        if known in _TABLE:
            return _TABLE[known]
    return next((family for family, pattern in _PATTERNS if pattern.search(base)), "other")


def _without_endings(base: str) -> str:
    """Strip endings: ``gelu_backward`` to ``gelu``, ``batch_norm2d`` to ``batch_norm``, ``add_n``
    to ``add``."""
    name = re.sub(r"(_double)?_backward(_data|_input|_weight|_reduce|_elemt|_impl)?$", "", base)
    name = re.sub(r"(_for_cpu|_functional|_copy|_n|_v2|[1-3]d)$", "", name)
    return name.strip("_")


def family_index(kinds: Iterable[str]) -> IntArray:
    """Index in `FAMILIES` of each op kind."""
    position = {family: index for index, family in enumerate(FAMILIES)}
    return np.array([position[family_of(kind)] for kind in kinds], dtype=np.int32)


def refine(family: IntArray, signature: IntArray, signatures: Sequence[str]) -> IntArray:
    """Refine families by shape: products whose 16-bit rows are not aligned get a family of their
    own.

    ``signature`` indexes ``signatures``, -1 if an op has none.
    """
    # One more entry than signatures: -1 (unknown) selects the last, which is not unaligned.
    unaligned = np.array([*map(_is_unaligned, signatures), False])
    is_matmul = family == FAMILIES.index("matmul")
    refined: IntArray = np.where(
        is_matmul & unaligned[signature], FAMILIES.index("matmul_unaligned"), family
    ).astype(np.int32)
    return refined


def _is_unaligned(signature: str) -> bool:
    """True if the contiguous side of a 16-bit matrix is no multiple of a 16-byte load.

    The number of rows does not matter. The result of a product is contiguous along the columns of
    its second matrix.
    """
    matrices = [
        (shape, strides) for shape, strides in tensor_layouts(signature, _HALF) if len(shape) > 1
    ]
    sides = [_contiguous_side(shape, strides) for shape, strides in matrices]
    sides += [matrices[-1][0][-1]] if matrices else []
    return any(side > _ALIGNED_SIDE and side % _ALIGNED_SIDE > 0 for side in sides)


def _contiguous_side(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> int:
    if strides is None or strides[-1] == 1 or strides[-2] != 1:
        return shape[-1]
    return shape[-2]
