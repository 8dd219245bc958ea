"""What an op costs, as far as its shapes tell: kind, signature, dtype, flops, bytes touched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from hocket.capture.flops import count_flops
from hocket.capture.recording import Cost, TensorLayout
from hocket.graph import DTYPES

_DTYPE_INDEX = {
    torch.float32: DTYPES.index("float32"),
    torch.float64: DTYPES.index("float64"),
    torch.bfloat16: DTYPES.index("bfloat16"),
    torch.float16: DTYPES.index("float16"),
    torch.float8_e4m3fn: DTYPES.index("float8"),
    torch.float8_e5m2: DTYPES.index("float8"),
    torch.int8: DTYPES.index("int8"),
}
_OTHER = DTYPES.index("other")

_ALLOCATES_ONLY = frozenset({"empty", "empty_like", "empty_strided", "new_empty",
                             "new_empty_strided", "empty_permuted"})  # fmt: skip
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
"""Ops that read no more of their first tensor than they write."""
_SCATTERS = frozenset({"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_",
                       "scatter_add_"})  # fmt: skip
"""Ops that write no more of their first tensor than the other ones hold."""
_OVERWRITES = frozenset({"fill_", "zero_", "copy_", "bernoulli_", "normal_", "uniform_",
                         "exponential_", "random_"})  # fmt: skip
"""Ops that write their first tensor without reading it."""


def dtype_index(dtype: torch.dtype) -> int:
    """Index into `hocket.graph.DTYPES`."""
    return _DTYPE_INDEX.get(dtype, _OTHER)


@cache
def kind_of(function: Any) -> str:
    """Name of an overload without its variant: ``aten.mm``."""
    return str(function._overloadpacket)


def describe(
    function: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    inputs: Sequence[TensorLayout],
    outputs: Sequence[TensorLayout],
    *,
    is_view: bool,
    signature: str,
) -> Cost:
    """The cost of one call on tensors of the given layouts."""
    kind = kind_of(function)
    name = kind.rpartition(".")[2]
    computes = [layout for layout in (*inputs, *outputs) if layout.dtype.is_floating_point]
    dtype = (computes or [*inputs, *outputs])[0].dtype if inputs or outputs else torch.float32
    flops = 0.0 if is_view else count_flops(function, kind, args, kwargs, result)
    touched = 0 if is_view else _bytes_touched(name, inputs, outputs)
    return Cost(kind, signature, dtype_index(dtype), flops, touched)


def _bytes_touched(
    name: str, inputs: Sequence[TensorLayout], outputs: Sequence[TensorLayout]
) -> int:
    if name in _ALLOCATES_ONLY:
        return 0
    read = [layout.touched_bytes for layout in inputs]
    written = sum(layout.touched_bytes for layout in outputs)
    if name in _GATHERS and read:
        read[0] = min(read[0], written)
    elif name in _OVERWRITES and read:
        read[0] = 0
    elif name in _SCATTERS and read:
        written = min(written, sum(read[1:]))
        read[0] = min(read[0], written)
    return sum(read) + written


def signature_text(function: Any, args: Any, kwargs: Any) -> str:
    """Op, dtypes, shapes, unusual strides and constants as one text; equal text, equal cost."""
    parts = [_leaf_text(arg) for arg in args]
    parts += [f"{key}={_leaf_text(value)}" for key, value in kwargs.items()]
    return f"{function}({', '.join(parts)})"


def layout_text(layout: TensorLayout) -> str:
    """A tensor in a signature: ``float32[8,1024]``, with strides where not contiguous."""
    shape = ",".join(map(str, layout.shape))
    text = f"{_short_dtype(layout.dtype)}[{shape}]"
    if layout.stride != _contiguous_stride(layout.shape):
        text += "{" + ",".join(map(str, layout.stride)) + "}"
    return text


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, TensorLayout):
        return layout_text(leaf)
    if isinstance(leaf, list | tuple) and any(isinstance(item, TensorLayout) for item in leaf):
        return "[" + ", ".join(_leaf_text(item) for item in leaf) + "]"
    if isinstance(leaf, torch.dtype):
        return _short_dtype(leaf)
    if isinstance(leaf, torch.device):
        return leaf.type
    return str(leaf)


@cache
def _short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
