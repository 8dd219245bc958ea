"""Bytes that one device sends per step, by the kind of parallelism that asks for them.

Narayanan et al. 2021 (tensor, pipeline with scatter and gather), Rajbhandari et al. 2020 (ZeRO),
Liu et al. 2023 (ring attention), Lepikhin et al. 2020 (experts). Collectives are counted as rings
do them: an all-reduce of S bytes over n ranks sends 2 (n - 1) / n S, a gather or a scatter half of
it. O(divisions).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.arrays import FloatArray
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.state import WEIGHT_BYTES, state_tables
from hocket.transformer import RECOMPUTES, Divisions, Transformer
from hocket.transformer.counts import sparse_layers

_ELEMENT = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Volumes:
    """Bytes that a device in the middle of a pipeline sends in one step."""

    tensor_bytes: FloatArray
    """All-reduces of layers, or gathers and scatters with sequence parallelism."""
    pipeline_bytes: FloatArray
    """To the next and the previous stage; with scattering, a tensor-parallel rank's part."""
    data_bytes: FloatArray
    """Gradients, and weights with ZeRO."""
    context_bytes: FloatArray
    """Keys and values around the ring, and their gradients."""
    expert_bytes: FloatArray
    """Tokens to their experts and back."""


def volumes(model: Transformer, divisions: Divisions, software: Software) -> Volumes:
    """Bytes per device and step of every division."""
    work = _Work.of(model, divisions)
    return Volumes(
        tensor_bytes=_tensor_bytes(divisions, work),
        pipeline_bytes=_pipeline_bytes(divisions, work, software),
        data_bytes=_data_bytes(model, divisions, work, software),
        context_bytes=_context_bytes(model, divisions, work),
        expert_bytes=_expert_bytes(model, divisions, work),
    )


@dataclass(frozen=True, eq=False)
class _Work:
    """What all kinds of traffic are proportional to."""

    layers: FloatArray
    """Layers of one device."""
    num_microbatches: FloatArray
    hidden_bytes: FloatArray
    """The hidden state of one microbatch on one context-parallel rank."""
    passes: FloatArray
    """Times that a layer runs forward."""

    @classmethod
    def of(cls, model: Transformer, divisions: Divisions) -> _Work:
        d = divisions
        tokens = d.microbatch * (model.sequence / d.context)
        return cls(
            np.ceil(model.layers / (d.pipeline * d.chunks)) * d.chunks,
            (d.global_batch // (d.microbatch * d.data)).astype(np.float64),
            _ELEMENT * tokens * model.hidden,
            1.0 + (d.recompute == RECOMPUTES.index("full")),
        )


def _tensor_bytes(d: Divisions, work: _Work) -> FloatArray:
    """Two all-reduces per pass and layer; with sequence parallelism the backward gathers again."""
    gather = (d.tensor - 1) / d.tensor * work.hidden_bytes
    num_gathers = 4 * (work.passes + 1) + 2 * d.sequence_parallel
    return np.asarray(num_gathers * gather * work.layers * work.num_microbatches)


def _pipeline_bytes(d: Divisions, work: _Work, software: Software) -> FloatArray:
    parts = d.tensor if software.scatters_activations else np.ones_like(d.tensor)
    both_ways = 2 * (d.pipeline > 1) * d.chunks * work.num_microbatches
    return np.asarray(both_ways * work.hidden_bytes / parts)


def _data_bytes(model: Transformer, d: Divisions, work: _Work, software: Software) -> FloatArray:
    """ZeRO 0 reduces to all, 1 and 2 scatter and gather; 3 gathers for every pass."""
    ranks = d.data * d.context
    tables = state_tables(model, int(d.tensor.max(initial=1)))
    num_sparse = work.layers * (sparse_layers(model) / model.layers)
    shared = (work.layers - num_sparse) * tables.dense_layer[d.tensor]
    shared += num_sparse * tables.sparse_layer[d.tensor]
    expert_ranks = np.minimum(d.expert, ranks)
    routed = num_sparse * tables.routed[d.tensor] / expert_ranks
    gradient = software.gradient_bytes
    gathers = np.where(d.zero == 3, (work.passes + 1) * work.num_microbatches, 1.0)
    per_parameter = np.where(d.zero == 0, 2.0 * gradient, gradient + gathers * WEIGHT_BYTES)
    copies = ranks / expert_ranks
    sent = shared * (ranks - 1) / ranks + routed * (copies - 1) / copies
    return np.asarray(sent * per_parameter)


def _context_bytes(model: Transformer, d: Divisions, work: _Work) -> FloatArray:
    """Keys and values pass every other rank; in the backward their gradients do too."""
    heads = np.maximum(model.kv_heads / d.tensor, 1.0)
    block = 2 * heads * model.head_width * work.hidden_bytes / model.hidden
    rounds = (work.passes + 2) * (d.context - 1)
    return np.asarray(rounds * block * work.layers * work.num_microbatches)


def _expert_bytes(model: Transformer, d: Divisions, work: _Work) -> FloatArray:
    """To the experts and back, in every pass and in the backward."""
    if model.experts is None:
        return np.zeros(len(d))
    elsewhere = (d.expert - 1) / d.expert
    parts = np.where(d.sequence_parallel, d.tensor, 1)
    tokens = model.experts.active * work.hidden_bytes / parts
    num_sparse = work.layers * (sparse_layers(model) / model.layers)
    return np.asarray(
        2 * (work.passes + 1) * elsewhere * tokens * num_sparse * work.num_microbatches
    )
