"""The time of every possible stage: which layers, on which rank."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.kernels.containers import table
from hocket.planners.parallel.partition.choices import ChoiceState, new_choices
from hocket.planners.parallel.partition.costs import LayerCosts
from hocket.planners.parallel.partition.orders import StageWays

_T = TypeVar("_T", np.float64, np.int64)


class StageTables(NamedTuple):
    """Times of stages from ``start`` up to ``stop``, and where stages may end."""

    stage_s: FloatArray
    """[row, start, stop]: infinite where it does not fit."""
    sent_s: FloatArray
    """[stop]: both transfers of a microbatch over the boundary; 0 at the end."""
    first_stop: LongArray
    """[start]: the shortest stage that has a layer that counts ends here."""
    num_inexact: int
    """Stages for which the choice of ways was cut short."""


def stage_tables(costs: LayerCosts, order: StageWays) -> StageTables:
    """Times of all stages on all rows of an order, each with the fastest choice that fits."""
    return tables_of(costs, *_times(costs, order))


def tables_of(costs: LayerCosts, stage_s: FloatArray, num_inexact: int = 0) -> StageTables:
    """The given times, with what else the search for cuts reads."""
    counted = pointers(costs.counts)
    sent_s = np.concatenate(([0.0], 2.0 * np.asarray(costs.send_s)))
    sent_s[-1] = 0.0
    return StageTables(
        stage_s=table(stage_s, np.float64),
        sent_s=table(sent_s, np.float64),
        first_stop=table(np.searchsorted(counted, counted + 1), np.int64),
        num_inexact=num_inexact,
    )


def spans(values: NDArray[_T]) -> NDArray[_T]:
    """Sums over layers from start up to stop, of values per layer on the last axis."""
    zero = np.zeros((*values.shape[:-1], 1), dtype=values.dtype)
    sums = np.concatenate((zero, np.cumsum(values, axis=-1)), axis=-1)
    spanned: NDArray[_T] = sums[..., None, :] - sums[..., :, None]
    return spanned


def least_needs(costs: LayerCosts, order: StageWays) -> LongArray:
    """[row, start, stop]: the least memory that stages need, in whichever way layers are run."""
    kept = np.asarray(costs.activation_bytes, dtype=np.int64).min(axis=0)
    state = spans(np.asarray(costs.state_bytes, dtype=np.int64))
    needs: LongArray = spans(kept)[None] * order.in_flight[:, None, None] + state[None]
    return needs


def _times(costs: LayerCosts, order: StageWays) -> tuple[FloatArray, int]:
    """Every layer as fast as it can be run where that fits, else the best choice; and for how many
    stages this was cut short.
    """
    way_s = np.asarray(costs.forward_s)[None] + np.asarray(costs.backward_s)
    fastest = np.argmin(way_s, axis=0).T
    layers = np.arange(costs.num_layers)
    fast_s: FloatArray = spans(np.ascontiguousarray(way_s.min(axis=0).T))
    kept = spans(np.asarray(costs.activation_bytes, dtype=np.int64)[fastest, layers])
    limit = order.limit_bytes[:, None, None] - spans(np.asarray(costs.state_bytes, dtype=np.int64))
    stage_s = fast_s[order.kind]
    stage_s[kept[order.kind] * order.in_flight[:, None, None] > limit] = np.inf
    if costs.num_ways == 1:
        return stage_s, 0
    return stage_s, _fill_choices(costs, order, way_s, stage_s)


def _fill_choices(
    costs: LayerCosts, order: StageWays, way_s: FloatArray, stage_s: FloatArray
) -> int:
    """Replace the infinite times of stages that fit with some choice; how many were cut short."""
    from hocket.planners.parallel.partition.layer_kernels import fill_choices

    kept = np.asarray(costs.activation_bytes, dtype=np.int64)
    state = np.asarray(costs.state_bytes, dtype=np.int64)
    per_layer = np.concatenate((way_s.transpose(1, 0, 2).reshape(len(state), -1), kept.T), axis=1)
    alike = np.all(per_layer[1:] == per_layer[:-1], axis=1) & (state[1:] == state[:-1])
    choices = new_choices(costs.num_layers, costs.num_ways)
    fill_choices(
        order,
        table(way_s, np.float64),
        table(kept, np.int64),
        table(pointers(state), np.int64),
        table(np.concatenate(([False], alike)), np.bool_),
        choices,
        stage_s,
    )
    return int(choices.num_inexact[0])


def choice_of(costs: LayerCosts, order: StageWays, row: int, start: int, stop: int) -> list[int]:
    """The way of each layer of one stage that fits."""
    if costs.num_ways == 1:
        return [0] * (stop - start)
    from hocket.planners.parallel.partition.choice_kernels import choose

    state = _filled(costs, order, row, start, stop)
    limit = int(order.limit_bytes[row] - np.asarray(costs.state_bytes)[start:stop].sum())
    choose(state, stop - start, limit)
    return [int(way) for way in state.chosen[: stop - start]]


def _filled(costs: LayerCosts, order: StageWays, row: int, start: int, stop: int) -> ChoiceState:
    state = new_choices(stop - start, costs.num_ways)
    kind, count = int(order.kind[row]), int(order.in_flight[row])
    way_s = np.asarray(costs.forward_s)[None] + np.asarray(costs.backward_s)
    state.num_ways[:] = costs.num_ways
    state.time_s[:] = way_s[:, start:stop, kind].T
    state.memory_bytes[:] = np.asarray(costs.activation_bytes)[:, start:stop].T * count
    return state
