"""Tables from which the memory of a config is computed, as arrays for compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.cost.parallel.activations import NUM_MODES, SPLIT_FULL, activation_tables
from hocket.cost.parallel.in_flight import SPLITS_BACKWARD, V_SHAPED, in_flight_chunks
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.state import (
    bytes_per_parameter,
    live_bytes_per_parameter,
    state_tables,
)
from hocket.kernels.containers import table
from hocket.transformer import RECOMPUTES, SCHEDULES, Transformer

NUM_RECOMPUTES = len(RECOMPUTES)
FIRST_END, LAST_END, BOTH_ENDS = 3, 4, 5
"""Columns of `MemoryTables.by_tensor` for the ends of the model."""


class MemoryTables(NamedTuple):
    """Tables of one model and program; values that are used together are adjacent in memory."""

    by_place: FloatArray
    """At ``[(schedule * pipelines + pipeline) * chunks + chunk]``, seven columns: layers of the
    first and of the last rank; microbatches in flight on the first and on the last rank (chunks in
    flight divided by the number of chunks); microbatches whose logits are held; 1 if the first rank
    has the last stage too; dense layers of the first rank."""
    by_kept: FloatArray
    """At ``[(tensor * 2 + sequence_parallel) * modes + mode]``, bytes per sequence in five columns:
    saved by a layer; excess of that over a dense layer; temporary during recomputation; saved by
    the embedding; saved by logits and loss."""
    by_tensor: FloatArray
    """At ``[tensor]``, parameters in six columns: a layer (with experts if the model has any,
    without the routed ones); excess of a dense layer over it; routed experts of a layer; first end
    of the model; last end; both."""
    by_zero: FloatArray
    """At ``[zero]``, bytes per parameter in three columns: replicated on every rank, sharded over
    the ranks, and held temporarily."""
    mode: LongArray
    """At ``[schedule * recomputations + recompute]``: mode of `ActivationTables`."""
    num_pipelines: int
    num_chunks: int
    most_shards: float
    """Largest number of replicas that shard state among them."""


@lru_cache(maxsize=16)
def memory_tables(
    model: Transformer, software: Software, max_tensor: int, max_pipeline: int, max_chunks: int
) -> MemoryTables:
    """Build the tables for all degrees up to the given maxima."""
    state = state_tables(model, max_tensor)
    activations = activation_tables(model, software, max_tensor)
    kept, divided = bytes_per_parameter(software)
    layer = state.sparse_layer if model.experts else state.dense_layer
    modes = np.ones(NUM_MODES)
    by_kept = (
        activations.sparse_layer,
        activations.sparse_layer - activations.dense_layer,
        np.maximum(activations.sparse_working, activations.dense_working)
        if model.experts and model.experts.dense_layers
        else activations.sparse_working,
        activations.first[..., None] * modes,
        activations.last[..., None] * modes,
    )
    by_tensor = (
        layer,
        state.dense_layer - layer,
        state.routed,
        state.first,
        state.last,
        state.first + state.untied,
    )
    return MemoryTables(
        by_place=_side_by_side(_placement(model, max_pipeline, max_chunks)),
        by_kept=_side_by_side(by_kept),
        by_tensor=_side_by_side(by_tensor),
        by_zero=_side_by_side((kept, divided, live_bytes_per_parameter(software))),
        mode=table(_modes().ravel(), np.int64),
        num_pipelines=max_pipeline + 1,
        num_chunks=max_chunks + 1,
        most_shards=software.most_shards,
    )


def _side_by_side(columns: Sequence[FloatArray]) -> FloatArray:
    return table(np.stack([column.ravel() for column in columns], axis=1), np.float64)


def _modes() -> LongArray:
    modes = np.tile(np.arange(len(RECOMPUTES), dtype=np.int64), (len(SCHEDULES), 1))
    modes[SPLITS_BACKWARD, RECOMPUTES.index("full")] = SPLIT_FULL
    return modes


def _placement(model: Transformer, max_pipeline: int, max_chunks: int) -> list[FloatArray]:
    """The columns of ``by_place``."""
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
