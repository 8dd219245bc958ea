"""What products of rows that are sorted by expert give, for tensors without memory.

PyTorch multiplies them in any type but says the results of bfloat16 alone: a mixture of experts in
float32, as its configuration makes it, could not be recorded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hocket.capture.recurrent import know

_ALIGNMENT_BYTES = 16
"""Rows of results begin at multiples of it where PyTorch is built for CUDA."""


@cache
def know_grouped_products() -> None:
    """Have fake tensors know their op in every type."""
    aten: Any = torch.ops.aten
    know(aten._grouped_mm.default, _product)


def _product(
    mode: Any, func: Any, rows: Any, matrices: Any, offs: Any = None, bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    if rows.dtype == matrices.dtype == torch.bfloat16:
        return NotImplemented
    dtype = out_dtype or rows.dtype
    is_batch = rows.dim() == matrices.dim()
    shape = [rows.shape[-2], matrices.shape[-1]]
    if is_batch:
        shape = [len(offs) if rows.dim() == 2 else len(rows), *shape]
    width = shape[-1]
    if torch.version.cuda:
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        width = -(-width // unit) * unit
    stride = [shape[-2] * width, width, 1] if is_batch else [width, 1]
    return rows.new_empty_strided(shape, stride, dtype=dtype)
