"""Memory of every stage and every rank of one config, with any number of layers per stage.

Uses the same tables as `memory`, but sums the layers of each stage and the stages of each rank.
O(virtual stages), numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.cost.parallel.activations import activation_tables, place_of
from hocket.cost.parallel.in_flight import in_flight_chunks
from hocket.cost.parallel.overheads import MemoryOverheads
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.state import state_rates, state_tables
from hocket.transformer import ParallelConfig, ParallelConfigs, Transformer


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes per stage and per rank of one config, overheads included."""

    activation_bytes: tuple[int, ...]
    """Bytes that each virtual stage saves of one microbatch until the end of its backward pass."""
    weight_gradient_bytes: tuple[int, ...]
    """Part of ``activation_bytes`` that the weight gradients read."""
    state_bytes: tuple[int, ...]
    """Bytes per rank of weights, gradients, optimizer state, working buffers and libraries."""
    peak_bytes: tuple[int, ...]
    """Peak per rank: ``state_bytes`` and the activations of the most microbatches in flight."""


def stage_memory(
    model: Transformer,
    config: ParallelConfig,
    software: Software,
    overheads: MemoryOverheads | None = None,
) -> StageMemory:
    """Memory of the stages of one config; ``overheads`` defaults to the program's own."""
    overheads = overheads or software.overheads
    layers = np.array(config.stage_layers(model.layers))
    first_sparse = model.experts.dense_layers if model.experts else model.layers
    num_dense = np.clip(first_sparse - (np.cumsum(layers) - layers), 0, layers)
    stages = _Stages(
        num_dense=num_dense,
        num_sparse=layers - num_dense,
        is_first=np.arange(len(layers)) == 0,
        is_last=np.arange(len(layers)) == len(layers) - 1,
        ranks=np.array(config.stage_ranks),
    )
    saved, logits, weight_gradient, working = _activation_bytes(model, config, software, stages)
    factor = overheads.activation_factor
    fixed = overheads.constant_bytes + factor * stages.largest(working)
    fixed = fixed + overheads.state_factor * _state_bytes(model, config, software, stages)
    rank = np.arange(config.pipeline, dtype=np.float64)
    pipeline, chunks = np.full_like(rank, config.pipeline), np.array(float(config.chunks))
    held = in_flight_chunks(config.schedule, pipeline, chunks, rank) / chunks
    num_microbatches = np.minimum(config.num_microbatches, held)
    # If the backward pass follows at once, the logits of only one microbatch are held at a time.
    num_logits = np.where(np.isinf(held), config.num_microbatches, 1)
    held_bytes = stages.total(saved) * num_microbatches + stages.total(logits) * num_logits
    return StageMemory(
        activation_bytes=_rounded(factor * (saved + logits)),
        weight_gradient_bytes=_rounded(factor * weight_gradient),
        state_bytes=_rounded(fixed),
        peak_bytes=_rounded(fixed + factor * held_bytes),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Stages:
    """Virtual stages, one entry each."""

    num_dense: LongArray
    num_sparse: LongArray
    is_first: BoolArray
    is_last: BoolArray
    ranks: LongArray

    def total(self, values: FloatArray) -> FloatArray:
        """Sum over the stages of each rank."""
        return np.asarray(np.bincount(self.ranks, values), np.float64)

    def largest(self, values: FloatArray) -> FloatArray:
        """Maximum over the stages of each rank."""
        found = np.zeros(self.ranks.max() + 1)
        np.maximum.at(found, self.ranks, values)
        return found

    def larger(self, dense: FloatArray, sparse: FloatArray) -> FloatArray:
        """The larger value of the kinds of layers that a stage has."""
        found = np.maximum(dense * (self.num_dense > 0), sparse * (self.num_sparse > 0))
        return np.asarray(found)


def _activation_bytes(
    model: Transformer, config: ParallelConfig, software: Software, stages: _Stages
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Bytes of one microbatch: saved by layers and embedding, by logits and loss, read by weight
    gradients, and temporary during recomputation."""
    tables = activation_tables(model, software, config.tensor)
    place = place_of(ParallelConfigs.of([config]))
    ends = place[:2]
    # Sequences of one microbatch per device: a fraction under context parallelism.
    share = config.microbatch / config.context
    layers = stages.num_dense * tables.dense_layer[place]
    layers = layers + stages.num_sparse * tables.sparse_layer[place]
    saved = share * (layers + tables.first[ends] * stages.is_first)
    logits = share * tables.last[ends] * stages.is_last
    gradient = (stages.num_dense + stages.num_sparse) * tables.weight_gradient[ends]
    # Half of what the loss saves is read by the gradient of the output layer's weights.
    weight_gradient = np.minimum(share * gradient + logits / 2, saved + logits)
    working = stages.larger(tables.dense_working[place], tables.sparse_working[place])
    return saved, logits, weight_gradient, share * working


def _state_bytes(
    model: Transformer, config: ParallelConfig, software: Software, stages: _Stages
) -> FloatArray:
    """Bytes of weights, gradients and optimizer state of each rank."""
    tables, tensor = state_tables(model, config.tensor), config.tensor
    own = state_rates(tables, ParallelConfigs.of([config]), software)
    dense, sparse = tables.dense_layer[tensor], tables.sparse_layer[tensor]
    parameters = stages.num_dense * dense + stages.num_sparse * sparse
    parameters = parameters + tables.first[tensor] * stages.is_first
    parameters = parameters + tables.last[tensor] * (stages.is_last & ~stages.is_first)
    state = parameters * own.per_parameter + stages.num_sparse * own.routed * own.per_routed
    live = own.live * stages.larger(dense, sparse + own.routed)
    found = stages.total(state) + stages.largest(live)
    if stages.ranks[0] == stages.ranks[-1]:
        # A tied output layer on the embedding's device needs no copy of the matrix.
        counted = 0.0 if len(stages.ranks) == 1 else tables.last[tensor]
        found[stages.ranks[0]] += (tables.untied[tensor] - counted) * own.per_parameter.item()
    return found


def _rounded(values: FloatArray) -> tuple[int, ...]:
    return tuple(map(round, values.tolist()))
