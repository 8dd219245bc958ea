"""Memory of the fullest device for any number of configs of a transformer, in closed form.

State follows Rajbhandari et al. 2020 (ZeRO), activations follow Korthikanti et al. 2022, and
microbatches in flight follow each schedule's warm-up. Terms that depend on few fields are tabulated
first, so a config takes a few look-ups and products: O(configs) numpy. `stage_memory` computes all
stages of one config, with any numbers of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.cost.parallel.activations import ActivationTables, activation_tables, place_of
from hocket.cost.parallel.in_flight import V_SHAPED, in_flight_chunks
from hocket.cost.parallel.overheads import MemoryOverheads
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.state import StateRates, state_rates, state_tables
from hocket.transformer import SCHEDULES, ParallelConfigs, Transformer


def memory(
    model: Transformer,
    configs: ParallelConfigs,
    software: Software,
    overheads: MemoryOverheads | None = None,
) -> FloatArray:
    """Bytes on the fullest device of each config; ``overheads`` defaults to the program's own.

    Stages are even; if the layers are not a multiple of the stages, the first stages get one more.
    Only the first and the last rank of each pipeline are computed, since one of them is the
    fullest.
    """
    overheads = overheads or software.overheads
    if not len(configs):
        return np.zeros(0)
    place = configs.schedule, configs.pipeline, configs.chunks
    layers, last_layers, first_held, last_held, logits_held, both, num_dense = (
        table[place]
        for table in _placement(model, int(configs.pipeline.max()), int(configs.chunks.max()))
    )
    tables = activation_tables(model, software, int(configs.tensor.max()))
    share = configs.microbatch / configs.context
    layer, excess, working, embedding, logits = (share * b for b in _kept_bytes(tables, configs))
    count = configs.global_batch // (configs.microbatch * configs.data)
    # In a pipeline, the next rank may have only layers with experts, so no dense layer is credited.
    excess = np.where(configs.pipeline > 1, np.minimum(excess, 0.0), excess)
    first_held = np.minimum(count, first_held)
    last_edge = logits * np.minimum(count, logits_held)
    first_edge = embedding * first_held + both * last_edge
    first_kept = (layer * layers - num_dense * excess) * first_held
    last_kept = layer * last_layers * np.minimum(count, last_held)
    rank = _RankState.of(model, configs, software)
    first_state = rank.state_bytes(layers, num_dense, np.where(both, rank.both_ends, rank.first))
    last_state = rank.state_bytes(last_layers, 0.0 * num_dense, rank.last)
    state_factor, factor = overheads.state_factor, overheads.activation_factor
    first = state_factor * first_state + factor * (first_kept + first_edge)
    last = state_factor * last_state + factor * (last_kept + last_edge)
    # One rank has both ends of the model in a V, or without a pipeline.
    fullest = np.where(both, first, np.maximum(first, last))
    return np.asarray(overheads.constant_bytes + fullest + factor * working, np.float64)


def _kept_bytes(tables: ActivationTables, configs: ParallelConfigs) -> list[FloatArray]:
    """Bytes per sequence of each config: saved by a layer, their excess over those of a dense
    layer, temporary during recomputation, saved by the embedding, saved by logits and loss."""
    place = place_of(configs)
    ends = place[:2]
    sparse = tables.sparse_layer[place]
    working = np.maximum(tables.sparse_working[place], tables.dense_working[place])
    excess = sparse - tables.dense_layer[place]
    return [sparse, excess, working, tables.first[ends], tables.last[ends]]


@dataclass(frozen=True, eq=False)
class _RankState:
    """Parameters and bytes per parameter of a rank, one entry per config."""

    own: StateRates
    layer: FloatArray
    """Parameters of a layer, with experts if the model has any, without the routed ones."""
    more_if_dense: FloatArray
    """Excess of a dense layer's parameters over those of ``layer``."""
    first: FloatArray
    last: FloatArray
    both_ends: FloatArray
    is_pipeline: BoolArray

    @classmethod
    def of(cls, model: Transformer, configs: ParallelConfigs, software: Software) -> _RankState:
        held, tensor = state_tables(model, int(configs.tensor.max())), configs.tensor
        layer = (held.sparse_layer if model.experts else held.dense_layer)[tensor]
        return cls(
            own=state_rates(held, configs, software),
            layer=layer,
            more_if_dense=held.dense_layer[tensor] - layer,
            first=held.first[tensor],
            last=held.last[tensor],
            both_ends=(held.first + held.untied)[tensor],
            is_pipeline=configs.pipeline > 1,
        )

    def state_bytes(self, layers: FloatArray, num_dense: FloatArray, end: FloatArray) -> FloatArray:
        """Bytes of state of a rank with these layers and the parameters ``end`` besides them."""
        own = self.own
        routed_bytes = own.routed * own.per_routed
        more = self.more_if_dense * own.per_parameter - routed_bytes
        # In a pipeline the next rank may have only layers with experts: the heavier type is
        # counted.
        more = np.where(self.is_pipeline, np.maximum(more, 0.0), more)
        largest = self.layer + own.routed
        dense = self.layer + self.more_if_dense
        largest = np.where(num_dense > 0, np.maximum(largest, dense), largest)
        kept_bytes = (layers * self.layer + end) * own.per_parameter
        return kept_bytes + layers * routed_bytes + num_dense * more + own.live * largest


@lru_cache(maxsize=16)
def _placement(model: Transformer, max_pipeline: int, max_chunks: int) -> list[FloatArray]:
    """Arrays ``[schedule, pipeline, chunks]``, for all degrees up to the given maxima.

    Layers of the first and of the last rank; microbatches in flight on either (chunks in flight
    divided by the number of chunks); microbatches whose logits are held; 1 if the first rank has
    the last stage too; dense layers of the first rank.
    """
    pipeline = np.maximum(np.arange(max_pipeline + 1, dtype=np.float64), 1.0)[:, None]
    chunks = np.maximum(np.arange(max_chunks + 1, dtype=np.float64), 1.0)[None, :]
    even, rest = np.divmod(float(model.layers), pipeline * chunks)
    rows = []
    for name, is_v in zip(SCHEDULES, V_SHAPED, strict=True):
        first_held = in_flight_chunks(name, pipeline, chunks, 0.0 * pipeline) / chunks
        last_held = in_flight_chunks(name, pipeline, chunks, pipeline - 1.0) / chunks
        # In a V, a rank inside may have a layer more than the ends: the first one represents it.
        first_more = np.ceil(rest / pipeline)
        last_more = 0.0 * rest if is_v else np.floor(rest / pipeline)
        rows.append(
            (
                even * chunks + first_more,
                even * chunks + last_more,
                first_held,
                last_held,
                np.where(np.isinf(first_held), np.inf, 1.0),
                ((pipeline == 1.0) | bool(is_v)) & (chunks > 0.0),
                _dense_layers(model, pipeline, chunks, bool(is_v)),
            )
        )
    return [np.stack(column).astype(np.float64) for column in zip(*rows, strict=True)]


def _dense_layers(
    model: Transformer, pipeline: FloatArray, chunks: FloatArray, is_v: bool
) -> FloatArray:
    """Number of dense layers (those before the layers with experts) on the first rank."""
    even, rest = np.divmod(float(model.layers), pipeline * chunks)
    found = np.zeros_like(even)
    if model.experts is None:
        return found
    for turn in range(int(chunks.max())):
        stage = turn * pipeline + (pipeline - 1 if is_v and turn % 2 else 0.0)
        start = stage * even + np.minimum(stage, rest)
        inside = np.clip(model.experts.dense_layers - start, 0.0, even + (stage < rest))
        found += np.where(turn < chunks, inside, 0.0)
    return found
