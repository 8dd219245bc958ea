"""Check candidates of the closed form in the event simulator.

Every stage of a candidate gets its own costs (including embedding, output layer and uneven numbers
of layers). Its schedule is simulated action by action, which gives step time, waiting and memory.
If the layers are not a multiple of the stages, or the ends of the pipeline are heavier, the exact
partitioner chooses the layers per stage; its choice is used if it is shorter in the simulator.
O(actions) each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.stages import stage_costs
from hocket.planners.parallel.forecast import (
    ConfigForecast,
    PoolStages,
    most_in_the_middle,
)
from hocket.planners.parallel.layer_partition import (
    LayerCosts,
    LayerPartition,
    PipelineRanks,
    in_flight_counts,
    partition_layers,
)
from hocket.planners.parallel.schedules import make_schedule
from hocket.simulate.pipeline import simulate_pipeline
from hocket.transformer import ParallelConfig

# Layers per stage if an equal number is impossible or not the best.
#
# The cost of a layer on each device type follows from the costs of stages with one layer and with
# none: their difference is a layer, and stages without layers show the embedding before the first
# and the output layer after the last. The exact partitioner then divides layers under the memory of
# every rank and with the microbatches that the schedule keeps in flight.


def _partition(candidate: ConfigForecast, *, reorder: bool) -> LayerPartition:
    """Partition of the layers with the shortest step on the candidate's devices.

    With ``reorder`` unequal ranks may change places. Raises `NoFeasiblePlanError` if nothing fits.
    """
    config, kinds = candidate.config, candidate.kinds
    schedule = make_schedule(
        config.schedule, config.pipeline, config.num_microbatches, config.chunks
    )
    names = list(dict.fromkeys(kinds))
    memory = dict(zip(kinds, candidate.limit_bytes, strict=True))
    costs, fixed_bytes = layer_costs(candidate, names, schedule.device_of_stage)
    ranks = PipelineRanks(
        device_types=[names.index(kind) for kind in kinds],
        memory_bytes=[max(memory[kind] - fixed_bytes, 0) for kind in names],
        in_flight=in_flight_counts(schedule).tolist(),
        num_microbatches=config.num_microbatches,
        rank_of_stage=tuple(schedule.device_of_stage.tolist()),
    )
    return partition_layers(costs, ranks, reorder=reorder)


def layer_costs(
    candidate: ConfigForecast, kinds: Sequence[str], rank_of_stage: IntArray
) -> tuple[LayerCosts, int]:
    """Costs of embedding, layers and output layer per device type, and bytes held by every rank."""
    num_layers, config = candidate.problem.training.model.layers, candidate.config
    forward, backward = np.zeros((2, num_layers + 2, len(kinds)))
    # Stages with no layer and with one: their difference is the cost of a layer.
    for column, kind in enumerate(kinds):
        none, one = (_alike(candidate, kind, count) for count in (0, 1))
        forward[:, column] = _spread(num_layers, none.forward_s, one.forward_s)
        backward[:, column] = _spread(num_layers, _backward_s(none), _backward_s(one))
    activation = _spread(num_layers, none.activation_bytes, one.activation_bytes)
    state, fixed_bytes = _state_bytes(num_layers, config.chunks, none, one, rank_of_stage)
    costs = LayerCosts(
        forward_s=forward,
        backward_s=backward,
        activation_bytes=np.rint(activation).astype(np.int64),
        state_bytes=np.rint(state).astype(np.int64),
        send_s=np.full(num_layers + 2, max(one.send_s, default=0.0)),
        counts=np.array([False, *[True] * num_layers, False]),
    )
    return costs, fixed_bytes


def _alike(candidate: ConfigForecast, kind: str, count: int) -> StageCosts:
    """Costs of stages that all have ``count`` layers, on ranks of one device type."""
    training, config = candidate.problem.training, candidate.config
    return stage_costs(
        training.model,
        replace(config, layers=(count,) * config.num_stages),
        candidate.cluster,
        training.software,
        training.coefficients,
        kinds=(kind,) * config.pipeline,
    )


def _backward_s(costs: StageCosts) -> list[float]:
    pairs = zip(costs.input_gradient_s, costs.weight_gradient_s, strict=True)
    return [input_s + weight_s for input_s, weight_s in pairs]


def _spread(num_layers: int, none: Sequence[float], one: Sequence[float]) -> FloatArray:
    """Costs of embedding, layers and output layer, from stages without layers and with one."""
    layer, least = _layer(none, one), min(none)
    # The smallest stage without layers has only fixed costs; the ends have embedding or output.
    return np.array([none[0] - least, *[layer] * num_layers, none[-1] - least])


def _layer(none: Sequence[float], one: Sequence[float]) -> float:
    """Cost of a layer: the median over the stages, since some layers may have experts."""
    return float(np.median(np.subtract(one, none)))


def _state_bytes(
    num_layers: int, chunks: int, none: StageCosts, one: StageCosts, rank_of_stage: IntArray
) -> tuple[FloatArray, int]:
    """Bytes of state of embedding, layers and output layer, and of every rank besides."""
    share, least = _layer(none.state_bytes, one.state_bytes), min(none.state_bytes)
    extra = [size - least for size in none.state_bytes]
    first, last = int(rank_of_stage[0]), int(rank_of_stage[-1])
    # In a V both ends of the model are on one rank: its extras are counted at one of them.
    ends = (extra[first], extra[last] if last != first else 0)
    return np.array([ends[0], *[share / chunks] * num_layers, ends[1]]), least


AS_SHORT = 0.001
"""Relative difference below which two steps count as equally long: no prediction is more exact."""


@dataclass(frozen=True, kw_only=True)
class RecheckEffort:
    """Limits on simulation work, as counts, so that results do not depend on machine speed."""

    num_simulated: int = 200
    max_actions: int = 40_000_000
    """Approximate number of schedule actions to simulate; it matters for very large batches."""
    num_balanced: int = 24
    """Number of best candidates with one stage per rank for which layers are partitioned again."""
    num_balanced_chunks: int = 4
    """The same for candidates with several stages per rank, whose partition takes longer."""


def recheck(candidates: Sequence[ConfigForecast], effort: RecheckEffort) -> list[ConfigForecast]:
    """Simulate the best candidates; returns fitting ones by step time, then the others."""
    num_simulated = _num_affordable(candidates, effort)
    seen = ranked([simulated(candidate) for candidate in candidates[:num_simulated]])
    chosen = _to_balance(seen, effort)
    better = [balanced(c) if i in chosen else c for i, c in enumerate(seen)]
    return ranked([*better, *candidates[num_simulated:]])


def _num_affordable(candidates: Sequence[ConfigForecast], effort: RecheckEffort) -> int:
    """Number of candidates to simulate: within the limits of the effort, but at least ten."""
    configs = [candidate.config for candidate in candidates[: effort.num_simulated]]
    # At most three actions per stage and microbatch: forward, input and weight gradient.
    actions = np.cumsum([3 * config.num_stages * config.num_microbatches for config in configs])
    return max(int(np.searchsorted(actions, effort.max_actions)), min(10, len(configs)))


def _to_balance(candidates: Sequence[ConfigForecast], effort: RecheckEffort) -> set[int]:
    """Positions of the best candidates with one stage per rank, and with several."""
    plain = [i for i, c in enumerate(candidates) if c.config.chunks == 1]
    others = [i for i, c in enumerate(candidates) if c.config.chunks > 1]
    return {*plain[: effort.num_balanced], *others[: effort.num_balanced_chunks]}


def ranked(candidates: Sequence[ConfigForecast]) -> list[ConfigForecast]:
    """Sort fitting candidates by step time, then the others by the bytes they lack (stable).

    Of all that are about as short as the shortest, the simplest config comes first.
    """
    order = sorted(candidates, key=lambda c: (not c.feasible, c.lacking_bytes, c.step_s))
    if not order or not order[0].feasible:
        return order
    longest_s = order[0].step_s * (1 + AS_SHORT)
    equals = [c for c in order if c.feasible and c.step_s <= longest_s]
    # Below this difference no prediction decides, so the simplest program wins.
    first = min(equals, key=lambda c: _fuss(c.config))
    return [first, *(candidate for candidate in order if candidate is not first)]


def _fuss(config: ParallelConfig) -> tuple[int, ...]:
    """Sort key: the features that a config needs of a training program, the least common first."""
    return (
        config.context,
        config.schedule not in ("1f1b", "interleaved"),
        config.zero if config.zero > 1 else 0,
        config.pipeline,
        config.tensor,
        config.chunks,
        config.zero,
        config.sequence_parallel,
    )


def simulated(candidate: ConfigForecast) -> ConfigForecast:
    """Simulate a candidate with even layers or, on unequal devices, with the best partition."""
    config, model = candidate.config, candidate.problem.training.model
    if len(candidate.stages.pools) > 1:
        return _partitioned(candidate, reorder=False)
    if config.layers is None and model.layers % config.num_stages:
        config = replace(config, layers=most_in_the_middle(model.layers, config.num_stages))
    return run(candidate, config)


def balanced(candidate: ConfigForecast) -> ConfigForecast:
    """The candidate with another partition of its layers if that is shorter and fits.

    On unequal devices, which already have the best partition, the order of the ranks is changed.
    """
    is_mixed = len(candidate.stages.pools) > 1
    if candidate.config.num_stages == 1 or not (candidate.simulated or is_mixed):
        return candidate
    other = _partitioned(candidate, reorder=is_mixed)
    if not other.feasible or (candidate.feasible and other.step_s >= candidate.step_s):
        return candidate
    return other


def _partitioned(candidate: ConfigForecast, *, reorder: bool) -> ConfigForecast:
    """The candidate with its best partition, simulated; infeasible if none fits."""
    try:
        found = _partition(candidate, reorder=reorder)
    except NoFeasiblePlanError as error:
        return replace(candidate, feasible=False, reason=error.message)
    # Each pool has one device type; types are numbered in the order of their first ranks.
    pools = list(dict.fromkeys(candidate.stages.pool_of_rank))
    stages = PoolStages.of_ranks([pools[kind] for kind in found.device_types])
    layers = found.layers if len(set(found.layers)) > 1 else None
    return run(replace(candidate, stages=stages), replace(candidate.config, layers=layers))


def run(candidate: ConfigForecast, config: ParallelConfig) -> ConfigForecast:
    """Simulate the candidate with this config."""
    training = candidate.problem.training
    costs = stage_costs(
        training.model, config, candidate.cluster, training.software, training.coefficients,
        kinds=candidate.kinds,
    )  # fmt: skip
    schedule = make_schedule(
        config.schedule, config.pipeline, config.num_microbatches, config.chunks
    )
    timeline = simulate_pipeline(schedule, costs)
    seen = replace(
        candidate,
        config=config,
        step_s=timeline.makespan_s,
        bubble=timeline.idle_share,
        parts_s=_scaled_parts(candidate.parts_s, timeline.makespan_s, timeline.idle_share),
        peak_bytes=tuple(timeline.peak_bytes.tolist()),
        simulated=True,
        schedule=schedule,
    )
    return replace(seen, feasible=seen.lacking_bytes == 0, reason="")


def _scaled_parts(parts_s: Mapping[str, float], step_s: float, bubble: float) -> dict[str, float]:
    """Scale the parts so that they add up to the step, with the simulated waiting as it is."""
    waiting_s = bubble * step_s
    others_s = {name: value for name, value in parts_s.items() if name != "bubble"}
    # Parts of the closed form are scaled to the simulated step, except for the waiting time.
    scale = (step_s - waiting_s) / sum(others_s.values())
    return {name: waiting_s if name == "bubble" else scale * parts_s[name] for name in parts_s}
