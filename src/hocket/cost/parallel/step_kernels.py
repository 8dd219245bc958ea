"""Compiled code: distinct combinations among millions of configs, and the sums of their steps."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.cost.parallel.columns import ConfigColumns, Places, RankPlaces, Seen, StepTables
from hocket.cost.parallel.stage import DEPTH, FLUSH, GATHERED, SCARCE, V_HALF
from hocket.kernels import kernel

# Compiled code keeps values, not names: changing them must change the kept code.


@kernel
def mark_values(columns: ConfigColumns, devices_per_host: int, seen: Seen) -> None:
    """Mark the values that occur in each field."""
    for i in range(len(columns.tensor)):
        tensor, pipeline = columns.tensor[i], columns.pipeline[i]
        data, context = columns.data[i], columns.context[i]
        seen.tensor[tensor] = True
        seen.pipeline[pipeline] = True
        seen.data[data] = True
        seen.context[context] = True
        seen.expert[columns.expert[i]] = True
        seen.microbatch[columns.microbatch[i]] = True
        seen.recompute[columns.recompute[i]] = True
        seen.zero[columns.zero[i]] = True
        seen.sequence_parallel[columns.sequence_parallel[i]] = True
        seen.crosses[int(tensor * pipeline * data * context > devices_per_host)] = True


@kernel
def mark_stages(
    columns: ConfigColumns,
    devices_per_host: int,
    places: Places,
    code: IntArray,
    seen: BoolArray,
) -> None:
    """Number the stage combination of every config in ``code``, and mark the numbers that occur."""
    for i in range(len(columns.tensor)):
        tensor, pipeline, context = columns.tensor[i], columns.pipeline[i], columns.context[i]
        crosses = int(tensor * pipeline * columns.data[i] * context > devices_per_host)
        number = (
            places.tensor[tensor]
            + places.context[context]
            + places.expert[columns.expert[i]]
            + places.microbatch[columns.microbatch[i]]
            + places.recompute[columns.recompute[i]]
            + places.sequence_parallel[columns.sequence_parallel[i]]
            + places.pipeline[pipeline]
            + places.crosses[crosses]
        )
        code[i] = number
        seen[number] = True


@kernel
def mark_ranks(columns: ConfigColumns, places: RankPlaces, code: IntArray, seen: BoolArray) -> None:
    """Number the rank combination of every config in ``code``, and mark the numbers that occur."""
    for i in range(len(columns.tensor)):
        number = (
            places.tensor[columns.tensor[i]]
            + places.context[columns.context[i]]
            + places.expert[columns.expert[i]]
            + places.pipeline[columns.pipeline[i]]
            + places.data[columns.data[i]]
            + places.zero[columns.zero[i]]
        )
        code[i] = number
        seen[number] = True


@kernel
def rename(code: IntArray, position: IntArray) -> None:
    """Replace the numbers in ``code`` by their positions among those that occur."""
    for i in range(len(code)):
        code[i] = position[code[i]]


@kernel
def add_up(
    columns: ConfigColumns,
    stage: IntArray,
    rank: IntArray,
    tables: StepTables,
    hiding: tuple[float, float, float, float],
    step_s: FloatArray,
) -> None:
    """Write the seconds of every config's step to ``step_s``.

    ``hiding`` holds: 1 if data-parallel collectives overlap, 1 if transfers to the next stage
    overlap, the fraction that is never hidden, and the seconds of each further chunk.
    """
    overlaps, overlaps_pipeline, never, chunk_s = hiding
    for i in range(len(stage)):
        s, r = stage[i], rank[i]
        count = columns.global_batch[i] // (columns.microbatch[i] * columns.data[i])
        pattern = tables.pattern[columns.schedule[i]]
        chunks = columns.chunks[i]
        busy_s = tables.busy_s[s]
        hidden_s = overlaps * busy_s
        once_s, each_s = tables.once_s[r], tables.each_s[r]
        rounds = min(max(columns.pipeline[i] * (chunks - 1) / chunks, 1.0), max(count, 1))
        waited_s = np.sqrt(each_s**2 + hidden_s**2) if columns.zero[i] == GATHERED else each_s
        left_s = max(never * each_s, waited_s - hidden_s)
        bubble_s = (tables.fill_s[FLUSH, s] + (columns.pipeline[i] - 1) * left_s) / chunks
        if pattern != FLUSH:
            # Few microbatches have too few weight gradients to fill the wait.
            filled = min(1.0, count / (DEPTH[pattern] * columns.pipeline[i]))
            bubble_s = filled * tables.fill_s[pattern, s] + (1 - filled) * tables.fill_s[SCARCE, s]
        if pattern == V_HALF:
            bubble_s += count * tables.lag_s[s]
        # Work hides one thing at a time: collectives and transfers of a microbatch, or of the step.
        exchange_s = tables.exchange_s[s]
        sent_s = exchange_s
        if chunks > 1:
            beside_s = max(overlaps_pipeline * busy_s - (each_s - left_s), 0.0) / chunks
            sent_s = max(never * exchange_s, exchange_s - beside_s)
        taken_s = each_s + chunks * (exchange_s - sent_s)
        once_s = max(never * once_s, once_s - rounds * max(hidden_s - taken_s, 0.0))
        each_s = left_s + busy_s + chunks * sent_s + (chunks - 1) * chunk_s
        step_s[i] = count * each_s + bubble_s + once_s + tables.fixed_s[r]
