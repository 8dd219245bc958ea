"""Cost of memory-bound kernels by layout and dtype, relative to plain contiguous tensors.

Contiguous tensors of one dtype and shape are read by wide loads. Broadcast or strided ones are read
element by element, expanded ones cost time for elements that have no bytes, casts load two widths,
and sums over rows of a matrix need two passes. Rates of PyTorch's kernels on an H200 in eager steps
of 19 models (``benchmarks/predict/thirdparty.py``, 2026-11-18). O(length of a signature).
"""

from __future__ import annotations

import re
from math import prod

from hocket.cost.families import family_of
from hocket.graph.signatures import tensor_layouts

PLAIN, MIXED, STRIDED, EXPANDED = 1.0, 1.16, 1.56, 2.65
"""Slowdown of elementwise kernels by layout; they attained 4.3, 3.7, 2.8 and 1.6 of 4.8 TB/s."""
CAST, MOVED = 1.33, 1.9
"""Slowdown of copies to another dtype, and of concatenations and copies from or to strided tensors.
"""
SUMMED, COLUMN_KERNELS = 1.5, 3.0
"""Slowdown of sums, and the minimum launches of a sum over all but the last dimension (15 us or
more)."""
FILLED = 0.53
"""Cost of gradients of embeddings and gathers, relative to a gather: mostly a fill, which is
faster."""
SORT_KERNELS = 20.0
"""Kernels that sort and add the rows of an embedding's gradient."""
_FILLS = re.compile(r"^aten\.(embedding_dense_backward|nll_loss\w*_backward)\.")
_SUMMED = re.compile(r"\], \[([-0-9, ]*)\]")
_TYPE = re.compile(r"(float32|bfloat16|float16|float64)\[")


def streamed(signature: str) -> tuple[float, float]:
    """Equivalent bytes of a kernel relative to the bytes that it touches, and number of kernels."""
    name = signature.partition("(")[0]
    fills = _FILLS.match(signature)
    if fills is not None:
        return FILLED, SORT_KERNELS if fills[1].startswith("embedding") else 1.0
    family = family_of(name)
    if family == "elementwise":
        return _elementwise(signature), 1.0
    if family == "copy":
        return _copied(name, signature), 1.0
    if family == "reduction" and name.startswith("aten.sum."):
        return SUMMED, _sum_kernels(signature)
    return 1.0, 1.0


def _elementwise(signature: str) -> float:
    layouts = [(s, strides) for s, strides in tensor_layouts(signature) if prod(s) > 1]
    # Scalars are no memory traffic, whatever their layout.
    if any(_is_expanded(shape, strides) for shape, strides in layouts):
        return EXPANDED
    if any(strides is not None for _, strides in layouts) or len({s for s, _ in layouts}) > 1:
        return STRIDED
    return MIXED if len(set(_TYPE.findall(signature))) > 1 else PLAIN


def _copied(name: str, signature: str) -> float:
    layouts = tensor_layouts(signature)
    if name.startswith("aten.cat.") or any(strides is not None for _, strides in layouts):
        return MOVED
    return CAST if name.startswith("aten._to_copy.") else 1.0


def _sum_kernels(signature: str) -> float:
    layouts, dims = tensor_layouts(signature), _SUMMED.search(signature)
    if not layouts or not layouts[0][0] or dims is None:
        return 1.0
    last = len(layouts[0][0]) - 1
    summed = {int(dim) % (last + 1) for dim in dims[1].split(",") if dim.strip()}
    return 1.0 if last in summed else COLUMN_KERNELS


def _is_expanded(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    if strides is None:
        return False
    return any(step == 0 and extent > 1 for extent, step in zip(shape, strides, strict=True))
