"""Layers of a division's stages where equal shares do not exist or are not best.

What a layer costs on each device kind follows from the costs of stages with one layer and with
none: their difference is a layer, and stages without layers show the embedding before the first
and the output layer after the last. The exact partitioner then divides layers under the memory of
every rank and with the microbatches that the schedule keeps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.stages import stage_costs
from hocket.planners.parallelism.outlook import DivisionOutlook, PoolStages
from hocket.planners.parallelism.partition import (
    LayerCosts,
    LayerPartition,
    has_few_orders,
    in_flight_counts,
    partition_layers,
)
from hocket.planners.parallelism.schedules import make_schedule


def best_layers(candidate: DivisionOutlook) -> tuple[int, ...]:
    """Layers of each virtual stage with the shortest step on the candidate's devices.

    Raises `NoFeasiblePlanError` where no shares fit.
    """
    return _partition(candidate, reorder=False).layers


def best_order(candidate: DivisionOutlook) -> tuple[PoolStages, tuple[int, ...]]:
    """The order of the candidate's unequal ranks, and their layers, with the shortest step.

    Ranks have one stage each. Where there are too many orders, that of the candidate stays. Raises
    `NoFeasiblePlanError` where no order and no shares fit.
    """
    ranks = candidate.stages.pool_of_rank
    found = _partition(candidate, reorder=has_few_orders(ranks))
    # Pools are of one kind each, in the order in which the ranks first name them.
    pools = list(dict.fromkeys(ranks))
    return PoolStages.of_ranks([pools[kind] for kind in found.kinds]), found.layers


def _partition(candidate: DivisionOutlook, *, reorder: bool) -> LayerPartition:
    division, kinds = candidate.division, candidate.kinds
    schedule = make_schedule(
        division.schedule, division.pipeline, division.num_microbatches, division.chunks
    )
    names = list(dict.fromkeys(kinds))
    memory = dict(zip(kinds, candidate.limit_bytes, strict=True))
    costs, fixed_bytes = layer_costs(candidate, names, schedule.device_of_stage)
    return partition_layers(
        costs,
        kinds=[names.index(kind) for kind in kinds],
        memory_bytes=[max(memory[kind] - fixed_bytes, 0) for kind in names],
        in_flight=in_flight_counts(schedule).tolist(),
        num_microbatches=division.num_microbatches,
        rank_of_stage=schedule.device_of_stage.tolist(),
        reorder=reorder,
    )


def layer_costs(
    candidate: DivisionOutlook, kinds: Sequence[str], rank_of_stage: IntArray
) -> tuple[LayerCosts, int]:
    """The embedding, the layers and the output layer on each kind, and what all ranks hold."""
    num_layers, division = candidate.problem.training.model.layers, candidate.division
    forward, backward = np.zeros((2, num_layers + 2, len(kinds)))
    for column, kind in enumerate(kinds):
        none, one = (_alike(candidate, kind, count) for count in (0, 1))
        forward[:, column] = _spread(num_layers, none.forward_s, one.forward_s)
        backward[:, column] = _spread(num_layers, _backward_s(none), _backward_s(one))
    activation = _spread(num_layers, none.activation_bytes, one.activation_bytes)
    state, fixed_bytes = _state_bytes(num_layers, division.chunks, none, one, rank_of_stage)
    costs = LayerCosts(
        forward_s=forward,
        backward_s=backward[None],
        activation_bytes=np.rint(activation).astype(np.int64)[None],
        state_bytes=np.rint(state).astype(np.int64),
        send_s=np.full(num_layers + 2, max(one.send_s, default=0.0)),
        counts=np.array([False, *[True] * num_layers, False]),
    )
    return costs, fixed_bytes


def _alike(candidate: DivisionOutlook, kind: str, count: int) -> StageCosts:
    """Costs of stages that all have ``count`` layers, on ranks of one kind."""
    training, division = candidate.problem.training, candidate.division
    return stage_costs(
        training.model,
        replace(division, layers=(count,) * division.num_stages),
        candidate.cluster,
        training.software,
        training.coefficients,
        kinds=(kind,) * division.pipeline,
    )


def _backward_s(costs: StageCosts) -> list[float]:
    pairs = zip(costs.input_gradient_s, costs.weight_gradient_s, strict=True)
    return [input_s + weight_s for input_s, weight_s in pairs]


def _spread(num_layers: int, none: Sequence[float], one: Sequence[float]) -> FloatArray:
    """Embedding, layers, output layer: from stages without layers and with one."""
    layer, least = _layer(none, one), min(none)
    return np.array([none[0] - least, *[layer] * num_layers, none[-1] - least])


def _layer(none: Sequence[float], one: Sequence[float]) -> float:
    """A layer; where some have experts and some not, what most stages have."""
    return float(np.median(np.subtract(one, none)))


def _state_bytes(
    num_layers: int, chunks: int, none: StageCosts, one: StageCosts, rank_of_stage: IntArray
) -> tuple[FloatArray, int]:
    """State of embedding, layers and output layer, and what every rank holds besides."""
    share, least = _layer(none.state_bytes, one.state_bytes), min(none.state_bytes)
    extra = [size - least for size in none.state_bytes]
    first, last = int(rank_of_stage[0]), int(rank_of_stage[-1])
    # In a V both ends of the model are on one rank: its extras are counted at one of them.
    ends = (extra[first], extra[last] if last != first else 0)
    return np.array([ends[0], *[share / chunks] * num_layers, ends[1]]), least
