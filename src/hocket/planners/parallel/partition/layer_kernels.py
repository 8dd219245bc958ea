"""The dynamic programme over stages and layers, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.kernels import kernel
from hocket.planners.parallel.partition.choice_kernels import least_time
from hocket.planners.parallel.partition.choices import ChoiceState
from hocket.planners.parallel.partition.cut_state import CutState
from hocket.planners.parallel.partition.orders import StageWays
from hocket.planners.parallel.partition.tables import StageTables


@kernel
def _step(
    order: StageWays, tables: StageTables, state: CutState, step: int, limit_s: float
) -> None:
    """Try every stage that one step of the order can add."""
    src, dst, row = order.src[step], order.dst[step], order.row[step]
    num_layers = len(tables.sent_s) - 1
    for start in range(num_layers):
        before_s = state.sum_s[src, start]
        if before_s == np.inf:
            continue
        for stop in range(tables.first_stop[start], num_layers + 1):
            stage_s = tables.stage_s[row, start, stop]
            if stage_s > limit_s or stage_s == np.inf:
                # Longer stages take more time and memory.
                break
            sum_s = before_s + stage_s + tables.sent_s[stop]
            if sum_s < state.sum_s[dst, stop]:
                state.sum_s[dst, stop] = sum_s
                state.came_from[dst, stop] = start
                state.came_step[dst, stop] = step


@kernel
def least_sum(order: StageWays, tables: StageTables, state: CutState, limit_s: float) -> float:
    """The least sum of stage times and transfers with no stage above the limit; or infinite."""
    num_ways, width = state.sum_s.shape
    for way in range(num_ways):
        for stop in range(width):
            state.sum_s[way, stop] = np.inf
    state.sum_s[0, 0] = 0.0
    for step in range(len(order.src)):
        _step(order, tables, state, step, limit_s)
    return float(state.sum_s[num_ways - 1, width - 1])


class _Layers(NamedTuple):
    way_s: FloatArray
    kept_bytes: LongArray
    state_sums: LongArray


@kernel
def _stage_time(
    order: StageWays, layers: _Layers, choices: ChoiceState, row: int, start: int, stop: int
) -> float:
    num_ways, kind = len(layers.way_s), order.kind[row]
    for layer in range(start, stop):
        choices.num_ways[layer - start] = num_ways
        for way in range(num_ways):
            choices.time_s[layer - start, way] = layers.way_s[way, layer, kind]
            bytes_ = layers.kept_bytes[way, layer] * order.in_flight[row]
            choices.memory_bytes[layer - start, way] = bytes_
    state_bytes = layers.state_sums[stop] - layers.state_sums[start]
    return least_time(choices, stop - start, order.limit_bytes[row] - state_bytes, -1.0)


@kernel
def fill_choices(
    order: StageWays, way_s: FloatArray, kept_bytes: LongArray, state_sums: LongArray,
    is_like_last: BoolArray, choices: ChoiceState, stage_s: FloatArray,
) -> None:  # fmt: skip
    """Times of the stages that do not fit with their fastest ways; infinite where none fits."""
    layers = _Layers(way_s, kept_bytes, state_sums)
    num_layers = len(is_like_last)
    for row in range(len(order.kind)):
        for start in range(num_layers):
            num_alike = 0
            for stop in range(start + 1, num_layers + 1):
                num_alike += is_like_last[stop - 1]
                if stage_s[row, start, stop] < np.inf:
                    continue
                if num_alike == stop - start:
                    # The same layers as in the stage one layer earlier.
                    stage_s[row, start, stop] = stage_s[row, start - 1, stop - 1]
                else:
                    time_s = _stage_time(order, layers, choices, row, start, stop)
                    stage_s[row, start, stop] = time_s
                if stage_s[row, start, stop] == np.inf:
                    break
