"""Bandwidth of kernels that stream tensors: how far layout and type keep them from the usual rate.

Contiguous tensors of one type and shape are read by wide loads. Broadcast or strided ones are read
element by element, expanded ones take time for elements that have no bytes, casts load two widths,
and sums over rows of a matrix need two passes. Rates of PyTorch's kernels on an H200 in eager steps
of 19 models (``benchmarks/predict/thirdparty.py``, 2026-11-18). O(length of a signature).
"""

from __future__ import annotations

import re
from math import prod

from hocket.cost.families import family_of
from hocket.graph.signatures import tensor_layouts

PLAIN, MIXED, STRIDED, EXPANDED = 1.0, 1.16, 1.56, 2.65
"""Time of elementwise kernels over that at the usual bandwidth: of 4.8 TB/s they reached 4.3, 3.7,
2.8 and 1.6."""
CAST, MOVED = 1.33, 1.9
"""The same of copies to another type and of copies from or to strided tensors, and joins."""
SUMMED, COLUMN_KERNELS = 1.5, 3.0
"""The same of sums, and the launches that one over all but the last dimension takes as long as at
least: 15 us and more."""
FILLED = 0.53
"""Gradients of embeddings and of picked losses: mostly a fill, which is quicker than a gather."""
SORT_KERNELS = 20.0
"""Kernels that sort and add up the rows of an embedding's gradient."""
_FILLS = re.compile(r"^aten\.(embedding_dense_backward|nll_loss\w*_backward)\.")
_SUMMED = re.compile(r"\], \[([-0-9, ]*)\]")
_TYPE = re.compile(r"(float32|bfloat16|float16|float64)\[")


def streamed(signature: str) -> tuple[float, float]:
    """Bytes that a kernel takes as long as, over those that it touches, and kernels launched."""
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
