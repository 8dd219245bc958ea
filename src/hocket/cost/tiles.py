"""What shapes make of work on an accelerator: tiles that few channels leave empty, and copies.

A convolution is a matrix product of pixels and kernels (implicit GEMM; Chetlur et al. 2014), whose
result is computed in tiles: NVIDIA's guide for convolutional layers asks for channels that 64
divide. Fewer channels take the time of a whole tile. Groups that share a tile are computed as one,
most of it zeros. Kernels of matrix units read channels last: tensors with channels first, as models
have them, are copied there and back. Norms over batches reduce each channel by one block of
threads, so that few channels leave most of a device idle, in 16 bits as in 32.
`benchmarks/cost/predict_small.py` measures all of it. O(length of a signature), each once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.streams import streamed
from hocket.graph.signatures import tensor_shapes

TILE_COLUMNS, TILE_DEPTH = 64, 32
"""Channels of the result, and of what is summed, that kernels compute at once."""
CONVOLUTION = 1.5
"""What tiles that channels leave partly empty take over the usual share of the peak."""
POINT_COPIED = 2.0
"""As `COPIED`, of windows of one pixel in float32, which some kernels read as they are."""
DEPTH_ELEMENT, DEPTH_TAP = 1333.0, 73.0
"""Operations at the usual rate that one element of a depthwise convolution takes, and each pixel of
its window: vector units do it. H200: 6 ps and 0.33 ps in both types."""
DEPTH_BACKWARD, DEPTH_WIDE_BACKWARD = 666.0, 1243.0
"""The same of both gradients per pixel of the window, up to 5 x 5 and above."""
DEPTH_WIDE_HALF = (43.0, 57.0)
"""In 16 bits windows above 5 x 5 have kernels of matrix units: factors forward and backward."""
NATIVE_WINDOW = 25
FLOAT32_NORM = 0.68
"""Time of cuDNN's norms over batches in float32 over PyTorch's own, which serve 16 bits."""
NORM_PASSES = 2.3
"""Bytes that norms move over those that they touch: for statistics first, then to use them; layer
norms and norms over groups and batches reach a quarter to a third of the bandwidth."""
IMAGE_CHANNELS, IMAGE_DEPTH = 4, 16
"""Images have at most so many channels, and kernels of their own, which sum fewer empty ones."""
WEIGHT_GRADIENT = 1.5
"""What gradients of weights take over a forward pass: their sums are over all pixels."""
COPIED = 3.0
"""Bytes that a convolution moves over those that it reads and writes, with both copies."""
KERNELS, BACKWARD_KERNELS = 4.0, 10.0
"""Kernels that a convolution launches one after the other, with its copies."""
FULL_CHANNELS, MOST_IDLE = 256, 8.0
"""Channels whose blocks of threads fill a device, and how much longer a norm over few takes at
most: a block alone gets more of the memory's bandwidth than among many."""
_NORM_BYTES = 4
"""Per element: such norms are no quicker in 16 bits."""
_CONVOLUTION = re.compile(r"^aten\.convolution(_backward)?(?:\.\w+)?\(")
_NORM = re.compile(
    r"^aten\.(?:native|cudnn|miopen|_fused)_(batch|group|layer|rms)_norm(?:_backward)?(?:\.\w+)?\("
)
_GROUPS = re.compile(r", ([0-9]{1,15})(?:, \[(?:True|False), (?:True|False), (?:True|False)\])?\)$")
_WANTED = re.compile(r", \[(True|False), (True|False), (?:True|False)\]\)$")


class ShapedWork(NamedTuple):
    """`Shaped` of many ops, one entry each."""

    flops: FloatArray
    bytes: FloatArray
    kernels: FloatArray
    fill: FloatArray


class Shaped(NamedTuple):
    """What an op asks of an accelerator over what its sizes say."""

    flops: float = 1.0
    bytes: float = 1.0
    kernels: float = 1.0
    """Launched one after the other."""
    fill: float = 1.0
    """The most of a device that its blocks of threads take."""


def shaped_work(signature: IntArray, signatures: Sequence[str]) -> ShapedWork:
    """The factors of many ops; ``signature`` indexes ``signatures``, -1 where unknown."""
    # One more than the signatures, so that -1 reads the last: as its sizes say.
    found = np.array([*map(shaped, signatures), Shaped()], dtype=np.float64)
    return ShapedWork(*found[signature].T)


@lru_cache(maxsize=65536)
def shaped(signature: str) -> Shaped:
    """The factors of one op; 1 where its kind or its shapes are not known."""
    norm = _NORM.match(signature)
    if norm is not None:
        if norm[1] != "batch":
            return Shaped(1.0, NORM_PASSES)
        idle = _idle(signature)
        width = _NORM_BYTES / 2 if _is_half(signature) else FLOAT32_NORM
        return Shaped(1.0, NORM_PASSES * idle * width, fill=1.0 / idle)
    match = _CONVOLUTION.match(signature)
    groups = _GROUPS.search(signature)
    if match is None or groups is None:
        return Shaped(1.0, *streamed(signature))
    shapes = tensor_shapes(signature)[1 if match[1] else 0 :]
    if len(shapes) < 2 or len(shapes[0]) < 3 or len(shapes[1]) != len(shapes[0]):
        return Shaped()
    after, before = shapes[1][:2]
    window = prod(shapes[1][2:])
    num_groups = int(groups[1])
    if not (after and before and window and num_groups):
        return Shaped()
    if num_groups == after and num_groups > 1:
        flops = _depthwise(window, bool(match[1]), _is_half(signature))
        return Shaped(flops, 1.0, BACKWARD_KERNELS if match[1] else KERNELS)
    flops = _waste(after // num_groups or 1, before, num_groups)
    if match[1]:
        flops = _backward_waste(signature, after, before, num_groups, flops)
    if _is_half(signature) and before <= IMAGE_CHANNELS:
        flops *= 2  # their kernels are no quicker in 16 bits
    if min(after, before) < TILE_COLUMNS:
        flops *= CONVOLUTION
    # Other strides than usual are stated: channels last, most likely.
    if "]{" in signature:
        return Shaped(flops)
    copied = COPIED if window > 1 or _is_half(signature) else POINT_COPIED
    return Shaped(flops, copied, BACKWARD_KERNELS if match[1] else KERNELS)


def _depthwise(window: int, is_backward: bool, is_half: bool) -> float:
    """Of a convolution in which every channel meets its own window alone."""
    if is_half and window > NATIVE_WINDOW:
        return DEPTH_WIDE_HALF[is_backward]
    per_tap = DEPTH_WIDE_BACKWARD if window > NATIVE_WINDOW else DEPTH_BACKWARD
    # Two operations per pixel of a window forward, four for both gradients.
    found = per_tap / 4 if is_backward else (DEPTH_ELEMENT + DEPTH_TAP * window) / (2 * window)
    return 2 * found if is_half else found


def _waste(columns: int, depth: int, groups: int) -> float:
    """Of a product with so many columns and so much to sum, per group."""
    if groups > 1:
        return max(1.0, TILE_COLUMNS / columns)
    tile = IMAGE_DEPTH if depth <= IMAGE_CHANNELS else TILE_DEPTH
    return _padded(columns, TILE_COLUMNS) * _padded(depth, tile)


def _backward_waste(signature: str, after: int, before: int, groups: int, own: float) -> float:
    """The mean of both gradients, of those that are wanted."""
    wanted = _WANTED.search(signature)
    inputs, weights = (flag == "True" for flag in (wanted.groups() if wanted else ("True",) * 2))
    parts = [own if groups > 1 else _waste(before, after, 1)] * inputs
    if groups == 1:
        tile = IMAGE_DEPTH if before <= IMAGE_CHANNELS else TILE_COLUMNS
        own = _padded(after, TILE_COLUMNS) * _padded(before, tile)
    parts += [WEIGHT_GRADIENT * own] * weights
    return sum(parts) / len(parts) if parts else 1.0


def _padded(number: int, tile: int) -> float:
    return ceil(number / tile) * tile / number


def _idle(signature: str) -> float:
    """How much longer a norm over batches takes for its few channels."""
    shapes = tensor_shapes(signature)
    if not shapes or len(shapes[0]) < 2 or not shapes[0][1]:
        return 1.0
    return min(MOST_IDLE, max(1.0, FULL_CHANNELS / shapes[0][1]))


def _is_half(signature: str) -> bool:
    return "(bfloat16[" in signature or "(float16[" in signature
