"""Time of 16-bit matrix products and fused attention by shape and chip; all costs use this model.

A large product attains a fixed fraction of the chip's peak (`Chip.matrix_share`). It loses time if
the inner dimension is short, because each output tile has a start and an end, and if the result
fills the multiprocessors only a few times, because the last wave leaves some of them idle. Fused
attention attains `AttentionRates`, less for short sequences and narrow heads.
`hocket.cost.roofline` uses it for ops of a graph, `hocket.cost.parallel` for transformer layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.chips import MULTIPROCESSORS, AttentionRates, Chip
from hocket.graph.signatures import tensor_shapes

MATRIX_WAVE = 3.5e6
"""Result elements that occupy all multiprocessors of an H200 once."""
MATRIX_TAIL = 0.14
"""Fraction of a wave lost per product."""
SPLIT_DEPTH = 8192.0
"""Inner dimension above which libraries split it over multiprocessors (split-K)."""
RATED_WIDTH = 128
"""Head width for which attention rates are stated."""
FUSED = "fused"
"""Attention kernel that PyTorch chooses for 16-bit inputs if available: cuDNN's on Hopper."""
HALF = ("bfloat16", "float16")
FLOAT32_DEPTH = 53.0
"""Like `Chip.matrix_depth`, for float32 products."""
POWER_SAVED, POWER_LIMITED = 0.5, 0.9
"""Fraction of a step spent in 16-bit products below which power does not limit their rate, and
above which it limits it fully."""
DROPOUT = 1.6
"""Slowdown of fused attention by drawing random numbers for dropout."""
_PRODUCT = re.compile(r"^aten\.(?:mm|bmm|addmm|baddbmm|addbmm)\.")
_DROPS = re.compile(r", 0\.(?=[0-9]*[1-9])[0-9]+, (?:True|False|\[)")
_ATTENTION = re.compile(r"^aten\._scaled_dot_product_\w*?attention(_backward)?\.")


def product_loss(
    elements: Any, depth: Any, matrix_depth: Any, shape: Any = 1.0, wave: float = MATRIX_WAVE
) -> Any:
    """Time of a product relative to a very large one.

    ``elements`` of the result, ``depth`` of the inner dimension, ``matrix_depth`` of the chip,
    elements of its ``wave``; ``shape`` scales both losses and is fitted by a calibration.
    """
    # Split-K turns a deep product into several, which fill the device better.
    waves = elements * np.maximum(1.0, depth / SPLIT_DEPTH) / wave
    return (1 + shape * matrix_depth / depth) * (1 + shape * MATRIX_TAIL / waves)


def attention_loss(width: Any, sequence: Any, width_half: Any, sequence_half: Any) -> Any:
    """Time of fused attention relative to the stated rate, which holds for wide heads and long
    sequences."""
    narrow = (width + width_half) / width * RATED_WIDTH / (RATED_WIDTH + width_half)
    return narrow * (1 + sequence_half / sequence)


class MatrixShape(NamedTuple):
    """Sizes that determine the time of a product or of 16-bit attention; zeros for other ops."""

    elements: float = 0.0
    """Elements of a product's result."""
    depth: float = 0.0
    width: float = 0.0
    """Head width of fused attention."""
    sequence: float = 0.0
    is_backward: float = 0.0
    is_half: float = 1.0
    drops: float = 0.0


def matrix_losses(
    signature: IntArray, signatures: Sequence[str], chip: Chip, num_multiprocessors: int
) -> FloatArray:
    """Time of each op over its arithmetic at the chip's usual rate; 1 for all other ops."""
    # A wave has as many tiles as the device has multiprocessors.
    wave = MATRIX_WAVE * num_multiprocessors / MULTIPROCESSORS["h200"]
    shapes = np.array([*map(matrix_shape, signatures), MatrixShape()], dtype=np.float64)
    elements, depth, width, sequence, is_backward, is_half, drops = shapes[signature].T
    loss = np.ones(len(signature))
    is_product, attends = depth > 0, width > 0
    half_depth = np.where(is_half > 0, chip.matrix_depth, FLOAT32_DEPTH)[is_product]
    loss[is_product] = product_loss(elements[is_product], depth[is_product], half_depth, wave=wave)
    rates = chip.attention[FUSED]
    for phase, half in ((0.0, rates.forward_half), (1.0, rates.backward_half)):
        part = attends & (is_backward == phase)
        slower = rates.forward / rates.backward if phase else 1.0
        loss[part] = slower * attention_loss(width[part], sequence[part], rates.width_half, half)
    return np.where(attends & (drops > 0), DROPOUT * loss, loss)


def power_limit(product_s: float, other_s: float, chip: Chip) -> float:
    """Slowdown of 16-bit products in a step, relative to `Chip.mixed_share`."""
    total_s = product_s + other_s
    share = product_s / total_s if total_s > 0 else 0.0
    limited = min(1.0, max(0.0, (share - POWER_SAVED) / (POWER_LIMITED - POWER_SAVED)))
    return chip.mixed_share / (chip.mixed_share + limited * (chip.matrix_share - chip.mixed_share))


def attention_rates(chip: Chip) -> AttentionRates:
    """Rates of the attention kernel that PyTorch chooses."""
    return chip.attention[FUSED]


@lru_cache(maxsize=65536)
def matrix_shape(signature: str) -> MatrixShape:
    """Shape of a 16-bit product or fused attention."""
    product, attention = _PRODUCT.match(signature), _ATTENTION.match(signature)
    if product is None and attention is None:
        return MatrixShape()
    shapes = tensor_shapes(signature, HALF)
    if product is not None:
        # Without 16-bit tensors the product is in float32.
        return _product_shape(shapes or tensor_shapes(signature, ("float32",)), bool(shapes))
    assert attention is not None
    first = 1 if attention[1] else 0
    if len(shapes) < first + 2 or any(len(shape) < 2 for shape in shapes[: first + 2]):
        return MatrixShape()
    query, key = shapes[first : first + 2]
    if not (query[-1] and key[-2]):
        return MatrixShape()
    drops = float(_DROPS.search(signature) is not None)
    return MatrixShape(0.0, 0.0, query[-1], key[-2], float(bool(attention[1])), 1.0, drops)


def _product_shape(shapes: list[tuple[int, ...]], is_half: bool) -> MatrixShape:
    matrices = [shape for shape in shapes if len(shape) > 1][-2:]
    if len(matrices) < 2:
        return MatrixShape()
    left, right = matrices
    elements = prod(left[:-1]) * right[-1]
    if not elements or not left[-1]:
        return MatrixShape()
    return MatrixShape(elements, left[-1], is_half=float(is_half))
