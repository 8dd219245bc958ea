"""Bytes of activations that one layer saves per sequence from its forward to its backward pass.

The terms follow Korthikanti et al. 2022, with 16-bit tensors and one-byte dropout masks. Their ``34
+ 5as/h`` is the sum for a GPT. Here every saved tensor is a term of its own, so the same code
covers grouped heads, gated MLPs, experts and 8-bit products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.parallel.in_flight import SPLITS_BACKWARD
from hocket.cost.parallel.software import Software
from hocket.transformer import RECOMPUTES, ParallelConfigs, Transformer

_ELEMENT = 2
"""Bytes of a 16-bit number."""
_LOGIT = 4
_TOKEN = 8

SPLIT_FULL = 3
"""Mode of full recomputation under a schedule with a split backward pass: recomputed tensors stay
until the weight gradients are computed. Modes 0 to 2 are positions in `RECOMPUTES`."""


def place_of(configs: ParallelConfigs) -> tuple[IntArray, IntArray, IntArray]:
    """Index of each config in the tables: tensor degree, sequence parallelism, mode."""
    is_full = configs.recompute == RECOMPUTES.index("full")
    mode = np.where(SPLITS_BACKWARD[configs.schedule] & is_full, SPLIT_FULL, configs.recompute)
    return configs.tensor, configs.sequence_parallel.astype(np.int32), mode.astype(np.int32)


@dataclass(frozen=True, eq=False)
class ActivationTables:
    """Bytes per sequence at ``[tensor, sequence_parallel, mode]``, for context degree 1."""

    dense_layer: FloatArray
    sparse_layer: FloatArray
    dense_working: FloatArray
    """Temporary bytes of one dense layer during its recomputation; 0 without recomputation."""
    sparse_working: FloatArray
    weight_gradient: FloatArray
    """Bytes that weight gradients read: inputs and output gradients of matrix products."""
    first: FloatArray
    """Bytes saved by the embedding, at ``[tensor, sequence_parallel]``."""
    last: FloatArray
    """Bytes saved by last norm, output layer and loss, at ``[tensor, sequence_parallel]``."""


def activation_tables(model: Transformer, software: Software, max_tensor: int) -> ActivationTables:
    """Build the tables for every tensor degree up to ``max_tensor``."""
    shape = _Shape.of(model, max_tensor)
    on_device = 1 - software.host_share
    dense = _layer(model, software, shape, model.mlp_width, 1, 0)
    dense_gradient = _weight_gradient(model, shape, model.mlp_width, 1)
    sparse, sparse_gradient = dense, dense_gradient
    experts = model.experts
    if experts:
        width = experts.active * experts.mlp_width + experts.shared_width
        routes = experts.active + (1 if experts.shared_width else 0)
        sparse = _layer(model, software, shape, width, routes, experts.count)
        sparse_gradient = _weight_gradient(model, shape, width, routes)
        # Without dense layers nothing may depend on the width of the dense MLP.
        dense = dense if experts.dense_layers else sparse
    return ActivationTables(
        dense_layer=on_device * _modes(dense, dense_gradient, shape),
        sparse_layer=on_device * _modes(sparse, sparse_gradient, shape),
        dense_working=_working(dense),
        sparse_working=_working(sparse),
        weight_gradient=sparse_gradient,
        first=_TOKEN * shape.tokens + float(model.dropout) * shape.whole,
        last=2 * _ELEMENT * shape.whole
        + software.logit_bytes * model.vocabulary * shape.tokens / shape.tensor,
    )


@dataclass(frozen=True, eq=False)
class _Shape:
    """Sizes that all terms use, as arrays ``[tensor, sequence_parallel]``."""

    tensor: FloatArray
    tokens: float
    whole: FloatArray
    """Elements of the hidden states on one rank; only sequence parallelism shards them."""

    @classmethod
    def of(cls, model: Transformer, max_tensor: int) -> _Shape:
        degrees = np.maximum(np.arange(max_tensor + 1, dtype=np.float64), 1.0)[:, None]
        tensor = np.repeat(degrees, 2, axis=1)
        divided = np.stack([np.ones(max_tensor + 1), degrees[:, 0]], axis=1)
        tokens = float(model.sequence)
        return cls(tensor, tokens, tokens * model.hidden / divided)


def _layer(
    model: Transformer, software: Software, shape: _Shape, width: int, routes: int, routed: int
) -> FloatArray:
    """Bytes that one layer saves, ``[tensor, sequence_parallel, plain or selective]``."""
    dropout = float(model.dropout)
    # Inputs of both norms, inputs of attention and of each active MLP; masks of both residuals.
    # 8-bit products save their inputs in 8 bits.
    product = 1 if software.dtype == "float8" else _ELEMENT
    whole = (_ELEMENT * 2 + product * (1 + routes) + 2 * dropout) * shape.whole
    if routed:
        # Each expert's output is kept for the gradient of the router, with the router's choices.
        weighed = 0 if software.weighs_inside else _ELEMENT * routes
        whole = whole + weighed * shape.whole + _LOGIT * routed * shape.tokens
    num_wide = 1 if model.mlp == "gelu" else 2
    inner = (_ELEMENT * num_wide + product) * width / shape.tensor
    divided = shape.tokens * (_ELEMENT * _attention(model, shape) + inner)
    # The matrix of all pairs: softmax, and with dropout its mask and its result.
    per_pair = _ELEMENT + dropout * (_ELEMENT + 1)
    pairs = per_pair * model.heads * shape.tokens**2 / shape.tensor
    kept_pairs = pairs if software.attention == "plain" else 0.0 * pairs
    # Results of both norms and of the MLP's activation, which the products after them read.
    cheap = 2 * product * shape.whole + product * shape.tokens * width / shape.tensor
    kept = whole + divided - (cheap if software.rematerialises else 0.0)
    everything = selected = kept + kept_pairs
    if software.selective == "attention":
        selected = kept
    elif software.selective == "activations":
        selected = whole + divided + kept_pairs - cheap
    else:
        # The layer's input, the result of attention, and every second product: of the projections,
        # of the result of attention and of the MLP with its gate.
        result = model.attention.output_width / shape.tensor
        products = _attention(model, shape) - result + num_wide * width / shape.tensor
        halves = _ELEMENT * shape.tokens * (result + products / 2) + 2 * _ELEMENT * shape.whole
        selected = np.minimum(halves, everything)
    return np.stack([everything, selected], axis=-1)


def _attention(model: Transformer, shape: _Shape) -> FloatArray:
    """Elements per token of queries, keys, values, their latents and attention's result."""
    own = model.attention
    keys = (own.key_width + own.value_width) * np.maximum(1 / shape.tensor, 1 / model.kv_heads)
    heads = (own.query_width + own.output_width) / shape.tensor
    return np.asarray(heads + keys + own.latent_width)


def _weight_gradient(model: Transformer, shape: _Shape, width: int, routes: int) -> FloatArray:
    """Bytes of the inputs and output gradients of one layer's matrix products."""
    num_matrices = 2 if model.mlp == "gelu" else 3
    divided = _attention(model, shape) + num_matrices * width / shape.tensor
    return np.asarray(_ELEMENT * (2 * (1 + routes) * shape.whole + shape.tokens * divided))


def _modes(layer: FloatArray, weight_gradient: FloatArray, shape: _Shape) -> FloatArray:
    inputs = _ELEMENT * shape.whole
    modes = [layer[..., 0], layer[..., 1], inputs, np.maximum(inputs, weight_gradient)]
    return np.stack(modes, axis=-1)


def _working(layer: FloatArray) -> FloatArray:
    """Temporary bytes of one layer's recomputation, per mode: none, the selected part, or all."""
    nothing = np.zeros_like(layer[..., 0])
    pairs = layer[..., 0] - layer[..., 1]
    return np.stack([nothing, pairs, layer[..., 0], layer[..., 0]], axis=-1)
