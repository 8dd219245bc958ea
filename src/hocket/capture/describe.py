"""Describe a call by its arguments: kind, signature, dtype, FLOPs, bytes, random draws.

`describe` returns the cost of a call, `count_flops` its FLOPs, `signature_text` a text that is
equal for calls of equal cost, and `draws` tells if the call draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from hocket.capture.recording import Cost, TensorLayout
from hocket.graph import DTYPES


class OpCall(NamedTuple):
    """A call of an op as PyTorch dispatches it, with its result."""

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any


# Floating-point operations of a call, by the registry of torch's own counter and a few formulas.
#
# Matrix products, convolutions, attention and fused recurrent layers are counted. Every other op
# counts 0, because its time is limited by the bytes that it moves. For causal attention, the pairs
# of tokens that fused kernels compute are counted, about half of all.


def count_flops(call: OpCall) -> float:
    """Floating-point operations of one call; a multiply-add counts as two."""
    kind, args = kind_of(call.function), call.args
    # First: PyTorch's counter lacks these ops, or ignores the groups of convolutions.
    if kind in _FORMULAS:
        return _FORMULAS[kind](*args)
    if kind.startswith("aten._scaled_dot_product_"):
        count = _attention_backward(*args) if "backward" in kind else _attention(*args)
        return count * _computed_share(call)
    registered = flop_registry.get(call.function._overloadpacket)
    if registered is None:
        return 0.0
    return float(registered(*args, **call.kwargs, out_val=call.result))


def _computed_share(call: OpCall) -> float:
    """Fraction of token pairs that a fused attention kernel computes; causal kernels skip future
    keys."""
    names = [argument.name for argument in call.function._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    if not given.get("is_causal"):
        return 1.0
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    # Query i attends to keys 0 to i; queries after the last key attend to all keys.
    short = min(queries, keys)
    pairs = short * (short + 1) / 2 + (queries - short) * keys
    return float(pairs / (queries * keys))


def _attention(query: Any, key: Any, value: Any, *_: Any) -> float:
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return float(2 * scores * (query.shape[-1] + value.shape[-1]))


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any) -> float:
    """FLOPs of the attention backward pass: scores again, then the gradients of weights, values,
    queries and keys."""
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return float(2 * scores * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _grouped_product(a: Any, b: Any, *_: Any) -> float:
    product = float(2 * a.numel() * b.shape[-1])
    # Groups along the columns of a 2-d ``b``: each matrix of ``a`` is multiplied by its columns
    # only.
    return product / float(a.shape[0]) if a.dim() == 3 and b.dim() == 2 else product


def _recurrent(inputs: Any, *weights: Any) -> float:
    flat = [t for w in weights for t in (w if isinstance(w, list | tuple) else [w])]
    matrices = [t for t in flat if hasattr(t, "dim") and t.dim() == 2]
    return float(2 * prod(inputs.shape[:-1]) * sum(matrix.numel() for matrix in matrices))


def _convolution_backward(gradient: Any, given: Any, weight: Any, *rest: Any) -> float:
    """FLOPs of a convolution's backward pass: each gradient costs as much as the forward pass.

    PyTorch's own counter ignores that groups only combine their own channels.
    """
    is_transposed, wanted = rest[4], rest[7]
    places = prod((given if is_transposed else gradient).shape[2:])
    forward = 2 * given.shape[0] * places * weight.numel()
    return float(forward * (bool(wanted[0]) + bool(wanted[1])))


_FORMULAS: dict[str, Callable[..., float]] = {
    "aten._grouped_mm": _grouped_product,
    "aten.convolution_backward": _convolution_backward,
    "aten.mkldnn_rnn_layer": lambda inputs, *rest: _recurrent(inputs, *rest[:2]),
    "aten.mkldnn_rnn_layer_backward": lambda inputs, *rest: 2 * _recurrent(inputs, *rest[:2]),
    "aten._cudnn_rnn": lambda inputs, weights, *_: _recurrent(inputs, weights),
    "aten._cudnn_rnn_backward": lambda inputs, weights, *_: 2 * _recurrent(inputs, weights),
}


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
"""Ops that read only the rows of their first tensor that they return."""
_SCATTERS = frozenset({"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_",
                       "scatter_add_"})  # fmt: skip
"""Ops that read and write only the rows of their first tensor that the other inputs address."""
_OVERWRITES = frozenset({"fill_", "zero_", "copy_", "bernoulli_", "normal_", "uniform_",
                         "exponential_", "random_"})  # fmt: skip
"""Ops that write their first tensor without reading it."""


def dtype_index(dtype: torch.dtype) -> int:
    """Index of a dtype in `hocket.graph.DTYPES`."""
    return _DTYPE_INDEX.get(dtype, _OTHER)


@cache
def kind_of(function: Any) -> str:
    """Op name without the overload: ``aten.mm``."""
    return str(function._overloadpacket)


def describe(
    call: OpCall, inputs: Sequence[TensorLayout], outputs: Sequence[TensorLayout], *,
    is_view: bool, signature: str,
) -> Cost:  # fmt: skip
    """The cost of one call on tensors of the given layouts."""
    kind = kind_of(call.function)
    computes = [layout for layout in (*inputs, *outputs) if layout.dtype.is_floating_point]
    dtype = (computes or [*inputs, *outputs])[0].dtype if inputs or outputs else torch.float32
    if is_view:
        return Cost(kind, signature, dtype_index(dtype), 0.0, 0)
    touched = _bytes_touched(kind.rpartition(".")[2], inputs, outputs)
    return Cost(kind, signature, dtype_index(dtype), count_flops(call), touched)


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
    """Op, dtypes, shapes, unusual strides and constants as text; equal texts mean equal costs."""
    parts = [_leaf_text(arg) for arg in args]
    parts += [f"{key}={_leaf_text(value)}" for key, value in kwargs.items()]
    return f"{function}({', '.join(parts)})"


def layout_text(layout: TensorLayout) -> str:
    """Text of a tensor in a signature: ``float32[8,1024]``, with strides if not contiguous."""
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


# ── random numbers ───────────────────────────────────────────────────────────────────────────────
#
# PyTorch's op tags say only that an op may draw. Fused attention and recurrent layers draw if their
# dropout is not zero. The backward pass of attention draws nothing, because it receives the seed of
# the forward pass. Calls that draw must run in recorded order, so a false positive costs overlap:
# two waves of a model with attention would wait for each other most of the time.

_DROPOUTS = ("dropout_p", "dropout")
"""Names of arguments that hold a dropout probability."""
_SEED = "philox_seed"
"""Name of an argument that holds the random state of another call."""


@cache
def may_draw(function: Any) -> bool:
    """True if an op draws random numbers for at least some arguments."""
    has_seed = any(argument.name == _SEED for argument in function._schema.arguments)
    return torch.Tag.nondeterministic_seeded in function.tags and not has_seed


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if this call of ``function`` draws random numbers."""
    if not may_draw(function):
        return False
    for position, argument in enumerate(function._schema.arguments):
        if argument.name in _DROPOUTS:
            default = argument.default_value or 0.0
            given = args[position : position + 1] or [kwargs.get(argument.name, default)]
            return bool(given[0])
    return True
