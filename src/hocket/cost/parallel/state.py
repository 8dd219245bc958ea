"""Parameters that one device holds, and bytes of state per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.software import Software
from hocket.transformer import ParallelConfigs, Transformer
from hocket.transformer.counts import mlp_parameters, norm_parameters

WEIGHT_BYTES = 2
"""Bytes of a 16-bit weight."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True, eq=False)
class StateTables:
    """Parameters of one device by tensor degree: entry ``t`` is for degree ``t``."""

    dense_layer: FloatArray
    """Parameters of a layer with a dense MLP."""
    sparse_layer: FloatArray
    """Parameters of a layer with experts, without the routed experts."""
    routed: FloatArray
    """Parameters of one layer's routed experts, before expert parallelism shards them."""
    first: FloatArray
    """Parameters of the token and position embeddings."""
    last: FloatArray
    """Parameters of the last norm, and of the output layer or its copy of the embedding."""
    untied: FloatArray
    """The same as ``last`` on a device that also holds the embedding: without a copy of it."""


def state_tables(model: Transformer, max_tensor: int) -> StateTables:
    """Parameters of one device for every tensor degree up to ``max_tensor``."""
    tensor = np.maximum(np.arange(max_tensor + 1, dtype=np.float64), 1.0)
    own, norm = model.attention, norm_parameters(model)
    # If tensor-parallel ranks outnumber heads of keys and values, these are replicated.
    key_share = np.maximum(1 / tensor, 1 / model.kv_heads)
    columns = own.query_width / tensor + own.up_width * key_share
    attention = own.query_rank * own.query_width / tensor + own.key_rank * own.up_width * key_share
    attention = attention + model.hidden * (own.output_width / tensor + own.latent_width)
    around = attention + float(model.biases) * (columns + model.hidden) + 2 * norm
    vocabulary = model.vocabulary * model.hidden / tensor
    positions = model.sequence * model.hidden if model.learned_positions else 0
    experts = model.experts
    shared = _mlp(model, experts.shared_width, tensor) if experts else 0.0
    router = model.hidden * experts.count if experts else 0
    return StateTables(
        dense_layer=around + _mlp(model, model.mlp_width, tensor),
        sparse_layer=around + router + shared,
        routed=experts.count * _mlp(model, experts.mlp_width, tensor)
        if experts
        else np.zeros_like(tensor),
        first=vocabulary + positions,
        last=vocabulary + norm,
        untied=norm + (np.zeros_like(tensor) if model.tied_embeddings else vocabulary),
    )


class StateRates(NamedTuple):
    """Bytes of state per parameter of one rank, and its routed experts, one entry per config."""

    per_parameter: FloatArray
    """Bytes per parameter without routed experts."""
    per_routed: FloatArray
    """Bytes per parameter of routed experts."""
    routed: FloatArray
    """Parameters of a layer's routed experts on the rank."""
    live: FloatArray
    """Bytes per parameter of a layer that are unsharded only while it runs.

    ZeRO-2 computes one layer's gradients before they are sharded. ZeRO-3 also gathers the weights
    of that layer and prefetches those of the next one.
    """


def state_rates(tables: StateTables, configs: ParallelConfigs, software: Software) -> StateRates:
    """Bytes of state per parameter of every config.

    The sharded bytes are 0 if they are offloaded to the host. The optimizer works on 32-bit
    gradients and copies its shard if gradients are summed in fewer bits. So a parameter takes 18
    bytes in all with 32-bit sums and 20 with 16-bit sums.
    """
    gradient = software.gradient_bytes + software.spare_gradient_bytes
    is_copied = software.copies_gradients and software.gradient_bytes < _FLOAT32_BYTES
    optimizer = software.optimizer_bytes + (_FLOAT32_BYTES if is_copied else 0)
    # By ZeRO stage: 0 replicates everything, 3 shards weights too.
    replicated = np.cumsum([0, WEIGHT_BYTES, gradient, optimizer], dtype=np.float64)[::-1]
    sharded = (0.0 if software.offloads else 1.0) * (replicated[0] - replicated)
    gathered = software.gradient_bytes + 2 * WEIGHT_BYTES
    live = np.array([0, 0, software.gradient_bytes, gathered], dtype=np.float64)
    replicated, sharded, live = (column[configs.zero] for column in (replicated, sharded, live))
    ranks = configs.data * configs.context
    shards = np.minimum(ranks, software.most_shards)
    expert_ranks = np.minimum(configs.expert, ranks)
    return StateRates(
        per_parameter=replicated + sharded / shards,
        per_routed=replicated + sharded * np.minimum(expert_ranks / shards, 1.0),
        routed=tables.routed[configs.tensor] / expert_ranks,
        live=live,
    )


def _mlp(model: Transformer, width: int, tensor: FloatArray) -> FloatArray:
    """Parameters of an MLP on one rank; its last bias is replicated on every rank."""
    if not width:
        return np.zeros_like(tensor)
    last_bias = model.hidden if model.biases else 0
    return (mlp_parameters(model, width) - last_bias) / tensor + last_bias
