"""Cuts with the shortest step of a pipeline, by the paths that a step is made of.

In a pipeline that keeps c microbatches in flight on a stage (1F1B: one more than stages follow), a
step takes at least the way of one microbatch through the stages before stage k, all m microbatches
on k itself, and what k waits: R, the way of a microbatch through all that follows and back, is
waited for once at the start behind c - 1 forwards and once at the end behind c - 1 backwards, and
in each round between if c microbatches of work are shorter than that way. The longest of these over
all k is the step; simulated 1F1B pipelines take the same within a few tenths of a percent where
stages are cut well. Cuts are found from the last stage on: of partial cuts those remain that no
other beats in both R and the step so far. O(stages · layers · layers of a stage · points).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels.containers import table
from hocket.planners.parallel.partition.costs import LayerCosts
from hocket.planners.parallel.partition.limits import Cuts
from hocket.planners.parallel.partition.orders import StageWays
from hocket.planners.parallel.partition.tables import StageTables

_MAX_POINTS = 1_000_000
_LESS = 1.0 - 1e-9
"""A step must be shorter than another by more than rounding to count."""


class PathTable(NamedTuple):
    """What the programme reads besides the times of stages."""

    forward_sums: FloatArray
    """[device kind, layer]: forward of all layers before."""
    before_s: FloatArray
    """[layer]: least time of all layers before, on the best kind each."""
    step_ptr: LongArray
    """Steps of the order that leave a way are from ``step_ptr[way]`` on."""
    num_microbatches: int


class PathState(NamedTuple):
    """Partial cuts, by the way that is still to fill and the layer where they start."""

    ptr: LongArray
    """[cell]: where the points of a cell begin; cell = way * (layers + 1) + start."""
    stop: LongArray
    """[cell]: where they end."""
    point_s: FloatArray
    """[point, 2]: the way through all its stages and back, and the step so far."""
    came: LongArray
    """[point, 3]: the step of the order, where the stage stops, and the point behind it."""
    is_full: LongArray
    """Whether points were lost for want of room."""


def shortest_cuts(
    costs: LayerCosts, tables: StageTables, order: StageWays, num_microbatches: int, known: Cuts
) -> tuple[Cuts, bool]:
    """The cuts with the shortest step, or ``known`` if none is shorter; whether that is proven."""
    from hocket.planners.parallel.partition.path_kernels import extend_paths

    path_table = _path_table(costs, order, num_microbatches)
    num_layers = costs.num_layers
    num_cells = order.num_ways * (num_layers + 1)
    state = PathState(
        ptr=np.zeros(num_cells, dtype=np.int64),
        stop=np.zeros(num_cells, dtype=np.int64),
        point_s=np.zeros((_MAX_POINTS, 2)),
        came=np.zeros((_MAX_POINTS, 3), dtype=np.int64),
        is_full=np.zeros(1, dtype=np.int64),
    )
    limit_s = path_time(costs, tables, order, num_microbatches, known) * _LESS
    extend_paths(order, tables, path_table, state, limit_s)
    found = range(int(state.ptr[0]), int(state.stop[0]))
    is_proven = not state.is_full[0]
    if not found:
        return known, is_proven
    best = min(found, key=lambda point: float(state.point_s[point, 1]))
    return _cuts_of(tables, order, state, best), is_proven


def path_time(
    costs: LayerCosts, tables: StageTables, order: StageWays, num_microbatches: int, cuts: Cuts
) -> float:
    """The step of given cuts."""
    forward = np.concatenate(
        (np.zeros((1, np.shape(costs.forward_s)[1])), np.cumsum(costs.forward_s, axis=0))
    )
    behind_s, step_s = 0.0, 0.0
    for stage in range(len(cuts.rows) - 1, -1, -1):
        row, start, stop = cuts.rows[stage], cuts.starts[stage], cuts.starts[stage + 1]
        stage_s, kind = float(tables.stage_s[row, start, stop]), int(order.kind[row])
        forward_s = float(forward[stop, kind] - forward[start, kind])
        behind_s += float(tables.sent_s[stop])
        own_s = stage_time(
            forward_s, stage_s, behind_s, int(order.in_flight[row]), num_microbatches
        )
        step_s = max(step_s + stage_s + float(tables.sent_s[stop]), own_s)
        behind_s += stage_s
    return step_s


def stage_time(
    forward_s: float, stage_s: float, behind_s: float, in_flight: int, num_microbatches: int
) -> float:
    """From a stage's first forward to its last backward: its work, and what it waits for."""
    backward_s, count = stage_s - forward_s, min(in_flight, num_microbatches)
    if count == num_microbatches:
        # All forwards, then all backwards: one wait.
        wait_s = max(0.0, behind_s - (count - 1) * min(forward_s, backward_s))
        return num_microbatches * stage_s + wait_s
    start_s = max(0.0, behind_s - (count - 1) * forward_s)
    end_s = max(0.0, behind_s - (count - 1) * backward_s)
    round_s = max(0.0, (behind_s + stage_s) / count - stage_s)
    rounds = num_microbatches - count - 1
    return num_microbatches * stage_s + start_s + end_s + rounds * round_s


def _path_table(costs: LayerCosts, order: StageWays, num_microbatches: int) -> PathTable:
    forward_s = np.asarray(costs.forward_s)
    kinds = np.unique(order.kind)
    fastest_s = (forward_s + np.asarray(costs.backward_s).min(axis=0))[:, kinds].min(axis=1)
    zero = np.zeros((1, forward_s.shape[1]))
    return PathTable(
        forward_sums=table(np.concatenate((zero, np.cumsum(forward_s, axis=0))).T, np.float64),
        before_s=table(np.concatenate(([0.0], np.cumsum(fastest_s))), np.float64),
        step_ptr=table(np.searchsorted(order.src, np.arange(order.num_ways + 1)), np.int64),
        num_microbatches=num_microbatches,
    )


def _cuts_of(tables: StageTables, order: StageWays, state: PathState, point: int) -> Cuts:
    """Follow a full point from its first stage to its last."""
    starts, rows = [0], []
    while point >= 0:
        step, stop, point = (int(value) for value in state.came[point])
        if step < 0:
            break
        starts.append(stop)
        rows.append(int(order.row[step]))
    stage_s = tables.stage_s[rows, starts[:-1], starts[1:]]
    sum_s = float(stage_s.sum() + tables.sent_s[starts[1:]].sum())
    return Cuts(tuple(starts), tuple(rows), sum_s, float(stage_s.max()))
