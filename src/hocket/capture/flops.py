"""Floating-point operations of a call, by the registry of torch's own counter and a few formulas.

Matrix products, convolutions, attention and fused recurrent layers are counted; every other op
counts 0, since its time is that of the bytes it moves. Causal attention counts the pairs of tokens
that fused kernels compute, about half.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch.utils.flop_counter import flop_registry


def count_flops(function: Any, kind: str, args: Any, kwargs: Any, result: Any) -> float:
    """Operations of one call, a multiplication and an addition counted as two."""
    own = _FORMULAS.get(kind)
    if own is not None:
        return own(*args)
    if kind.startswith("aten._scaled_dot_product_"):
        count = _attention_backward(*args) if "backward" in kind else _attention(*args)
        return count * _computed_share(function, args, kwargs)
    registered = flop_registry.get(function._overloadpacket)
    return 0.0 if registered is None else float(registered(*args, **kwargs, out_val=result))


def _computed_share(function: Any, args: Any, kwargs: Any) -> float:
    """Share of the pairs of tokens that a fused kernel computes: causal ones skip future keys."""
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if not given.get("is_causal"):
        return 1.0
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    # Query i meets keys 0 to i; queries behind the last key meet them all.
    short = min(queries, keys)
    pairs = short * (short + 1) / 2 + (queries - short) * keys
    return float(pairs / (queries * keys))


def _attention(query: Any, key: Any, value: Any, *_: Any) -> float:
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return float(2 * scores * (query.shape[-1] + value.shape[-1]))


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any) -> float:
    """Scores are computed again; then the gradients of weights, values, queries and keys."""
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return float(2 * scores * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _grouped_product(a: Any, b: Any, *_: Any) -> float:
    product = float(2 * a.numel() * b.shape[-1])
    # Groups along the columns of a flat ``b``: each matrix of ``a`` meets only its own columns.
    return product / float(a.shape[0]) if a.dim() == 3 and b.dim() == 2 else product


def _recurrent(inputs: Any, *weights: Any) -> float:
    flat = [t for w in weights for t in (w if isinstance(w, list | tuple) else [w])]
    matrices = [t for t in flat if hasattr(t, "dim") and t.dim() == 2]
    return float(2 * prod(inputs.shape[:-1]) * sum(matrix.numel() for matrix in matrices))


def _convolution_backward(gradient: Any, given: Any, weight: Any, *rest: Any) -> float:
    """Each gradient takes what the forward pass does; torch's counter forgets that groups only meet
    their own channels."""
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
