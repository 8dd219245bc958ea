"""Memory of every config in compiled code: a few look-ups and two dozen products each."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.activations import NUM_MODES
from hocket.cost.parallel.columns import ConfigColumns
from hocket.cost.parallel.memory_tables import (
    BOTH_ENDS,
    FIRST_END,
    LAST_END,
    NUM_RECOMPUTES,
    MemoryTables,
)
from hocket.kernels import kernel


@kernel
def _state_bytes(
    of: ConfigColumns, i: int, tables: MemoryTables, layers: float, num_dense: float, end: int
) -> float:
    """Bytes of state of a rank at the ``end`` of the model: the first, the last or both."""
    figures = tables.by_tensor[of.tensor[i]]
    layer, more_if_dense, routed = figures[0], figures[1], figures[2]
    kept, divided, live = tables.by_zero[of.zero[i]]
    ranks = float(of.data[i] * of.context[i])
    shards = min(ranks, tables.most_shards)
    share = 1.0 / shards
    per_parameter = kept + divided * share
    total: float = (layers * layer + figures[end]) * per_parameter
    if routed > 0.0:
        expert_ranks = min(float(of.expert[i]), ranks)
        routed /= expert_ranks
        routed_bytes = routed * (kept + divided * min(expert_ranks * share, 1.0))
        layer += routed
        more = more_if_dense * per_parameter - routed_bytes
        # In a pipeline, the next rank may have only experts: the heavier layer is counted.
        if of.pipeline[i] > 1:
            more = max(more, 0.0)
        total += layers * routed_bytes + num_dense * more
        if num_dense > 0.0:
            layer = max(layer, figures[0] + more_if_dense)
    total += live * layer
    return total


@kernel
def fill(
    of: ConfigColumns,
    tables: MemoryTables,
    overheads: tuple[float, float, float],
    state_bytes: FloatArray,
    activation_bytes: FloatArray,
    edge_bytes: FloatArray,
    total_bytes: FloatArray,
) -> None:
    """Fill the memory columns of every config."""
    constant, state_factor, activation_factor = overheads
    for i in range(len(of.tensor)):
        schedule = of.schedule[i]
        place = (schedule * tables.num_pipelines + of.pipeline[i]) * tables.num_chunks
        layers, last_layers, first_held, last_held, logits_held, both, num_dense = tables.by_place[
            place + of.chunks[i]
        ]
        mode = tables.mode[schedule * NUM_RECOMPUTES + of.recompute[i]]
        along = 1 if of.sequence_parallel[i] else 0
        layer, less_if_dense, working, embedding, logits = tables.by_kept[
            (of.tensor[i] * 2 + along) * NUM_MODES + mode
        ]
        share = of.microbatch[i] / of.context[i]
        # Exact for whole numbers of this size, and several times as fast as dividing integers.
        num = np.floor(float(of.global_batch[i]) / float(of.microbatch[i] * of.data[i]))
        if of.pipeline[i] > 1:
            less_if_dense = min(less_if_dense, 0.0)
        first_held = min(num, first_held)
        kept = share * (layer * layers - num_dense * less_if_dense) * first_held
        last_edge = share * logits * min(num, logits_held)
        edge = share * embedding * first_held + both * last_edge
        state = _state_bytes(of, i, tables, layers, num_dense, BOTH_ENDS if both else FIRST_END)
        work = share * working
        total = state_factor * state + activation_factor * (kept + edge)
        if not both:
            last = share * layer * last_layers * min(num, last_held)
            last_state = _state_bytes(of, i, tables, last_layers, 0.0, LAST_END)
            last_total = state_factor * last_state + activation_factor * (last + last_edge)
            if last_total > total:
                total, state, kept, edge = last_total, last_state, last, last_edge
        state_bytes[i] = state
        activation_bytes[i] = kept + work
        edge_bytes[i] = edge
        total_bytes[i] = constant + total + activation_factor * work
