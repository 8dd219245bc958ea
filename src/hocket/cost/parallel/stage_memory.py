"""Memory of every stage and every rank of one config, with any number of layers per stage.

Uses the same tables as `memory`, but sums the layers of each stage and the stages of each rank.
O(virtual stages).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.cost.parallel.activations import SPLIT_FULL, ActivationTables, activation_tables
from hocket.cost.parallel.in_flight import SPLITS_BACKWARD, in_flight_chunks
from hocket.cost.parallel.overheads import MemoryOverheads
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.state import (
    StateTables,
    bytes_per_parameter,
    live_bytes_per_parameter,
    state_tables,
)
from hocket.transformer import RECOMPUTES, SCHEDULES, ParallelConfig, Transformer
from hocket.transformer.stages import stage_layers, stage_ranks


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
    rates = _Rates.of(model, config, software)
    stages = _stages(model, config, rates)
    factor = overheads.activation_factor
    ranks = stage_ranks(config)
    states, peaks = [], []
    for rank in range(config.pipeline):
        mine = [stage for stage, on in zip(stages, ranks, strict=True) if on == rank]
        state = sum(stage.state for stage in mine) + max(stage.live for stage in mine)
        if rank == ranks[0] == ranks[-1]:
            state += rates.both_ends(config.num_stages)
        working = max(stage.working for stage in mine)
        fixed = overheads.constant_bytes + overheads.state_factor * state + factor * working
        states.append(fixed)
        peaks.append(fixed + factor * _held_bytes(config, rank, mine))
    return StageMemory(
        activation_bytes=tuple(round(factor * stage.activation) for stage in stages),
        weight_gradient_bytes=tuple(round(factor * stage.weight_gradient) for stage in stages),
        state_bytes=tuple(map(round, states)),
        peak_bytes=tuple(map(round, peaks)),
    )


@dataclass(frozen=True)
class _Stage:
    """Bytes of one virtual stage; activations are per microbatch."""

    layers: float
    edge: float
    logits: float
    weight_gradient: float
    working: float
    state: float
    live: float

    @property
    def activation(self) -> float:
        """Bytes that the stage saves of one microbatch."""
        return self.layers + self.edge + self.logits


@dataclass(frozen=True, eq=False)
class _Rates:
    """Values of one config that are the same for all of its stages."""

    held: StateTables
    kept: ActivationTables
    tensor: int
    mode: tuple[int, int, int]
    """Index of the config in `ActivationTables`."""
    share: float
    """Sequences of one microbatch per device: a fraction under context parallelism."""
    per_parameter: float
    per_routed: float
    routed: float
    """Parameters of one layer's routed experts on one device."""
    live: float

    @classmethod
    def of(cls, model: Transformer, config: ParallelConfig, software: Software) -> _Rates:
        mode = RECOMPUTES.index(config.recompute)
        if config.recompute == "full" and SPLITS_BACKWARD[SCHEDULES.index(config.schedule)]:
            mode = SPLIT_FULL
        ranks = config.data * config.context
        expert_ranks = min(config.expert, ranks)
        shards = min(ranks, software.most_shards)
        held = state_tables(model, config.tensor)
        kept, divided = (float(table[config.zero]) for table in bytes_per_parameter(software))
        return cls(
            held=held,
            kept=activation_tables(model, software, config.tensor),
            tensor=config.tensor,
            mode=(config.tensor, int(config.sequence_parallel), mode),
            share=config.microbatch / config.context,
            per_parameter=kept + divided / shards,
            per_routed=kept + divided * min(expert_ranks / shards, 1.0),
            routed=float(held.routed[config.tensor]) / expert_ranks,
            live=float(live_bytes_per_parameter(software)[config.zero]),
        )

    def stage(self, num_dense: int, num_sparse: int, is_first: bool, is_last: bool) -> _Stage:
        """Bytes of a stage with these numbers of dense and sparse layers, at either end or
        inside."""
        kept, ends = self.kept, self.mode[:2]
        layers = num_dense * kept.dense_layer[self.mode] + num_sparse * kept.sparse_layer[self.mode]
        working = max(
            kept.dense_working[self.mode] if num_dense else 0.0,
            kept.sparse_working[self.mode] if num_sparse else 0.0,
        )
        edge = kept.first[ends] if is_first else 0.0
        logits = kept.last[ends] if is_last else 0.0
        # Half of what the loss keeps is what the output layer's weights need.
        gradient = (num_dense + num_sparse) * kept.weight_gradient[ends] + logits / 2
        return _Stage(
            layers=self.share * float(layers),
            edge=self.share * float(edge),
            logits=self.share * float(logits),
            weight_gradient=self.share * min(float(gradient), float(layers + edge + logits)),
            working=self.share * float(working),
            state=self._state(num_dense, num_sparse, is_first, is_last),
            live=self.live * self._largest_layer(num_dense, num_sparse),
        )

    def both_ends(self, num_stages: int) -> float:
        """Bytes of state to add if one device has both the first and the last stage."""
        # A tied output layer on another device is a copy of the embedding; on the same, nothing.
        counted = 0.0 if num_stages == 1 else self.held.last[self.tensor]
        return float((self.held.untied[self.tensor] - counted) * self.per_parameter)

    def _state(self, num_dense: int, num_sparse: int, is_first: bool, is_last: bool) -> float:
        held, tensor = self.held, self.tensor
        parameters = num_dense * held.dense_layer[tensor] + num_sparse * held.sparse_layer[tensor]
        parameters += held.first[tensor] if is_first else 0.0
        parameters += held.last[tensor] if is_last and not is_first else 0.0
        return float(parameters) * self.per_parameter + num_sparse * self.routed * self.per_routed

    def _largest_layer(self, num_dense: int, num_sparse: int) -> float:
        """Parameters of the largest layer of the stage."""
        dense = float(self.held.dense_layer[self.tensor]) if num_dense else 0.0
        sparse = float(self.held.sparse_layer[self.tensor]) + self.routed if num_sparse else 0.0
        return max(dense, sparse)


def _stages(model: Transformer, config: ParallelConfig, rates: _Rates) -> list[_Stage]:
    dense_left = model.experts.dense_layers if model.experts else model.layers
    sizes = stage_layers(model, config)
    stages = []
    for index, size in enumerate(sizes):
        num_dense = min(size, dense_left)
        dense_left -= num_dense
        is_last = index == len(sizes) - 1
        stages.append(rates.stage(num_dense, size - num_dense, index == 0, is_last))
    return stages


def _held_bytes(config: ParallelConfig, rank: int, stages: list[_Stage]) -> float:
    """Bytes of activations of all microbatches in flight on a rank at its peak."""
    pipeline, chunks, index = np.array([[config.pipeline], [config.chunks], [rank]], dtype=float)
    held = in_flight_chunks(config.schedule, pipeline, chunks, index).item() / config.chunks
    num_microbatches = min(float(config.num_microbatches), held)
    # The loss is at the last stage: where its backward follows at once, one microbatch has logits.
    num_logits = config.num_microbatches if np.isinf(held) else 1
    total = sum(stage.layers + stage.edge for stage in stages) * num_microbatches
    return total + sum(stage.logits for stage in stages) * num_logits
