"""Both dynamic programs of `layer_partition`, in compiled code."""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.parallel.layer_partition import (
    CutState,
    PathState,
    PathTable,
    StageOrder,
    StageTables,
    stage_time,
)

_SAME = 1.0 + 1e-13
"""Ratio within which sums that were added in another order count as equal."""
_MAX_PER_CELL = 512

_stage_time = kernel(stage_time)


@kernel
def _step(
    order: StageOrder, tables: StageTables, state: CutState, step: int, limit_s: float
) -> None:
    """Try every stage that one edge of the order can add."""
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
def least_sum(order: StageOrder, tables: StageTables, state: CutState, limit_s: float) -> float:
    """Smallest sum of stage times and transfers with no stage above the limit, or infinity."""
    num_nodes, width = state.sum_s.shape
    for node in range(num_nodes):
        for stop in range(width):
            state.sum_s[node, stop] = np.inf
    state.sum_s[0, 0] = 0.0
    for step in range(len(order.src)):
        _step(order, tables, state, step, limit_s)
    return float(state.sum_s[num_nodes - 1, width - 1])


@kernel
def _insert(state: PathState, start: int, fill: int, behind_s: float, step_s: float) -> int:
    """Position of a new point within its cell, or -1 if another point beats it.

    Points that the new one beats are removed.
    """
    for at in range(start, fill):
        is_beaten = state.point_s[at, 0] <= behind_s * _SAME
        if is_beaten and state.point_s[at, 1] <= step_s * _SAME:
            return -1
    kept = start
    for at in range(start, fill):
        if state.point_s[at, 0] >= behind_s and state.point_s[at, 1] >= step_s:
            continue
        if kept < at:
            for column in range(2):
                state.point_s[kept, column] = state.point_s[at, column]
            for column in range(3):
                state.came[kept, column] = state.came[at, column]
        kept += 1
    return kept


@kernel
def _fill_cell(
    order: StageOrder, tables: StageTables, paths: PathTable, state: PathState, node: int,
    start: int, first: int, limit_s: float,
) -> int:  # fmt: skip
    """Compute all partial cuts whose first stage starts at one layer; returns their end."""
    num_layers, fill = len(tables.sent_s) - 1, first
    for step in range(paths.step_ptr[node], paths.step_ptr[node + 1]):
        row, dst = order.row[step], order.dst[step]
        forward = paths.forward_sums[order.device_type[row]]
        for stop in range(tables.first_stop[start], num_layers + 1):
            stage_s, sent_s = tables.stage_s[row, start, stop], tables.sent_s[stop]
            if not paths.before_s[start] + paths.num_microbatches * stage_s < limit_s:
                break
            cell = dst * (num_layers + 1) + stop
            for point in range(state.ptr[cell], state.stop[cell]):
                behind_s = state.point_s[point, 0] + sent_s
                own_s = _stage_time(
                    forward[stop] - forward[start], stage_s, behind_s, order.in_flight[row],
                    paths.num_microbatches,
                )  # fmt: skip
                step_s = max(state.point_s[point, 1] + stage_s + sent_s, own_s)
                if not paths.before_s[start] + step_s < limit_s:
                    continue
                at = _insert(state, first, fill, behind_s + stage_s, step_s)
                if at < 0:
                    continue
                if at == len(state.point_s) or at - first == _MAX_PER_CELL:
                    state.is_full[0], fill = 1, at
                    continue
                state.point_s[at, 0], state.point_s[at, 1] = behind_s + stage_s, step_s
                state.came[at, 0], state.came[at, 1], state.came[at, 2] = step, stop, point
                fill = at + 1
    return fill


@kernel
def extend_paths(
    order: StageOrder, tables: StageTables, paths: PathTable, state: PathState, limit_s: float
) -> None:
    """Fill all cells with the partial cuts that can lead to a step below the limit."""
    num_layers = len(tables.sent_s) - 1
    last = len(state.ptr) - 1
    state.point_s[0, 0], state.point_s[0, 1], state.came[0, 0] = 0.0, 0.0, -1
    state.ptr[last], state.stop[last] = 0, 1
    fill = 1
    for node in range(len(paths.step_ptr) - 3, -1, -1):
        for start in range(num_layers):
            cell = node * (num_layers + 1) + start
            if tables.first_stop[start] > num_layers or (node == 0 and start > 0):
                continue
            state.ptr[cell] = fill
            fill = _fill_cell(order, tables, paths, state, node, start, fill, limit_s)
            state.stop[cell] = fill
