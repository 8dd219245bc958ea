"""Exact partition of layers into pipeline stages: uneven stages, unequal devices, memory limits.

Two dynamic programs over (stages so far, layers so far) work together. The first minimizes the
simple objective sum t_i + (m - 1) max t_i for m microbatches and stage times t_i (Zheng et al.,
"Alpa", OSDI 2022, section 5), by limits on max t_i. The second uses that step time as its bound and
finds the shortest step of a pipeline with few microbatches in flight, as 1F1B executes it:

A stage with c microbatches in flight (under 1F1B: one more than the stages after it) starts after
one microbatch has passed the stages before it, computes all m microbatches, and waits. Let R be the
time of one microbatch through all following stages and back. The stage waits for R once at the
start after c - 1 forwards, once at the end after c - 1 backwards, and in each round between if c
microbatches of work are shorter than R. The longest sum of this form over all stages is the step
time; simulated 1F1B pipelines agree within a few tenths of a percent. Partial cuts are extended
from the last stage backwards, and only those stay that no other beats in both R and the step so
far.

O(stages x layers x layers of a stage) per limit, times the number of points in the second
program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, LongArray, pointers
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.kernels.containers import table
from hocket.plan.sections.schedule import Schedule, StageWork

_T = TypeVar("_T", np.float64, np.int64)
_MAX_STEPS = 20_000
"""Largest number of transitions for which all stage orders are searched."""
_MAX_POINTS = 1_000_000
"""Number of partial cuts of the second program for which memory is allocated."""
_PRECISION = 4e-10
"""Relative loss accepted when intervals are dropped, and once more when stages are evened."""
_LESS = 1.0 - 1e-9
"""Factor by which a step must be shorter than another one, so that rounding errors do not count."""
_MAX_MOVES = 256
"""Largest number of layer moves between ranks with several stages."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerCosts:
    """Costs of a model's layers per microbatch, in order.

    Embedding and output layer are layers too, with ``counts`` False: they take time and memory, but
    every stage needs at least one layer that counts.
    """

    forward_s: FloatArray
    """[layer, device type]: forward seconds."""
    backward_s: FloatArray
    """[layer, device type]: backward seconds, including recomputation."""
    activation_bytes: LongArray
    """[layer]: bytes saved per microbatch from its forward to its backward pass."""
    state_bytes: LongArray
    """[layer]: bytes of weights, gradients and optimizer state."""
    send_s: FloatArray
    """[layer]: seconds of one transfer, in either direction, if a stage ends after this layer."""
    counts: BoolArray
    """[layer]: True if it is included in the number of layers per stage."""

    @property
    def num_layers(self) -> int:
        """Number of layers, including those that do not count."""
        return len(self.state_bytes)


@dataclass(frozen=True, kw_only=True)
class LayerPartition:
    """Layers of each virtual stage, and the resulting pipeline."""

    starts: tuple[int, ...]
    """First layer of each virtual stage; the last entry is the number of layers."""
    layers: tuple[int, ...]
    """Number of layers that count, per virtual stage."""
    device_types: tuple[int, ...]
    """Device type of each pipeline rank."""
    stage_s: tuple[float, ...]
    """Forward and backward seconds of one microbatch, per virtual stage."""
    peak_bytes: tuple[int, ...]
    """Peak memory of each pipeline rank."""
    step_s: float
    """Time of the pipeline for one step."""
    is_optimal: bool
    """True if no partition has a shorter step; never with several stages per rank."""


class StageOrder(NamedTuple):
    """Orders of the ranks as a graph: nodes are sets of filled stages, each edge adds a stage.

    With a fixed order there is one node per number of stages. If ranks of unequal types may take
    any order, a node is the number of used ranks of each type. This covers all orders at once,
    because the microbatches in flight on a stage depend only on its position.
    """

    src: LongArray
    dst: LongArray
    row: LongArray
    """[edge]: row of the stage that it adds."""
    device_type: LongArray
    """[row]: device type of the stage."""
    in_flight: LongArray
    """[row]: microbatches in flight on the stage."""
    limit_bytes: LongArray
    """[row]: memory of one device of the stage."""

    @property
    def num_nodes(self) -> int:
        """Number of sets of filled stages; the first is empty, the last is full."""
        return int(self.dst[-1]) + 1


class StageTables(NamedTuple):
    """Times of stages from ``start`` up to ``stop``, and the places where stages may end."""

    stage_s: FloatArray
    """[row, start, stop]: seconds of a stage; infinite if it does not fit."""
    sent_s: FloatArray
    """[stop]: seconds of both transfers of a microbatch over the boundary; 0 at the end."""
    first_stop: LongArray
    """[start]: end of the shortest stage with a layer that counts."""


class CutState(NamedTuple):
    """Smallest sums of the first program over the ways to fill a node with the first layers."""

    sum_s: FloatArray
    """[node, layers]: smallest sum of stage times and transfers."""
    came_from: LongArray
    """[node, layers]: first layer of the last stage."""
    came_step: LongArray
    """[node, layers]: edge that added the last stage."""


class PathTable(NamedTuple):
    """Inputs of the second program besides the times of stages."""

    forward_sums: FloatArray
    """[device type, layer]: forward seconds of all layers before."""
    before_s: FloatArray
    """[layer]: shortest time of all layers before, each on its fastest device type."""
    step_ptr: LongArray
    """[node]: first of the edges that leave it."""
    num_microbatches: int


class PathState(NamedTuple):
    """Partial cuts of the second program, in cells by node still to fill and first layer."""

    ptr: LongArray
    """[cell]: first of its points; cell = node * (layers + 1) + start."""
    stop: LongArray
    """[cell]: end of its points."""
    point_s: FloatArray
    """[point, 2]: time through all its stages and back, and the step time so far."""
    came: LongArray
    """[point, 3]: edge, end of its first stage, and point of the stages behind it."""
    is_full: LongArray
    """1 if points were dropped because the allocated memory was full."""


@dataclass(frozen=True)
class Cuts:
    """First layers and rows of the stages, and the sum and maximum of the stage times."""

    starts: tuple[int, ...]
    rows: tuple[int, ...]
    sum_s: float
    max_s: float

    def total_s(self, weight: float) -> float:
        """Sum of the stage times plus the weighted maximum."""
        return self.sum_s + weight * self.max_s


@dataclass(frozen=True, kw_only=True)
class PipelineRanks:
    """Ranks of a pipeline, with their memory and their stages."""

    device_types: Sequence[int]
    """Device type of each pipeline rank."""
    memory_bytes: Sequence[int]
    """Memory of one device of each type."""
    in_flight: Sequence[int]
    """Largest number of microbatches whose activations each virtual stage holds."""
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    """Rank of each virtual stage."""


def partition_layers(
    costs: LayerCosts, ranks: PipelineRanks, *, reorder: bool = False
) -> LayerPartition:
    """Find the partition with the shortest step that fits into memory.

    With ``reorder``, ranks of unequal types with one stage each may take any order. With one stage
    per rank the step is optimal within one part in 10^9. With several stages per rank it is a good
    start, improved layer by layer. Raises `NoFeasiblePlanError` if nothing fits.
    """
    types_of = [ranks.device_types[rank] for rank in ranks.rank_of_stage]
    make = any_order if reorder else fixed_order
    order = make(types_of, ranks.memory_bytes, ranks.in_flight)
    if len(ranks.rank_of_stage) == len(ranks.device_types):
        return _exact(costs, order, ranks)
    return _with_chunks(costs, order, ranks)


def in_flight_counts(schedule: Schedule) -> LongArray:
    """Largest number of microbatches whose activations each virtual stage holds at once.

    A stage holds the activations of a microbatch until the microbatch's last backward action on
    it.
    """
    order = np.argsort(schedule.stage, kind="stable")
    work = schedule.work[order]
    frees = (work == StageWork.BACKWARD) | (work == StageWork.WEIGHT_GRADIENT)
    # Every stage frees what it took, so that one running sum serves all.
    held = np.cumsum((work == StageWork.FORWARD).astype(np.int64) - frees)
    starts = np.searchsorted(schedule.stage[order], np.arange(schedule.num_stages))
    counts: LongArray = np.maximum.reduceat(held, starts)
    return counts


# ── orders of ranks ──────────────────────────────────────────────────────────────────────────────


def fixed_order(
    types: Sequence[int], limits: Sequence[int], in_flight: Sequence[int]
) -> StageOrder:
    """Stages with the given device types; ``limits`` has the memory of each type."""
    steps = np.arange(len(types))
    return _order(steps, steps + 1, steps, np.asarray(types), np.asarray(in_flight), limits)


def has_few_orders(types: Sequence[int]) -> bool:
    """True if all orders of these device types can be searched."""
    num_of = [types.count(each) for each in set(types)]
    return prod(num + 1 for num in num_of) * len(num_of) <= _MAX_STEPS


def any_order(types: Sequence[int], limits: Sequence[int], in_flight: Sequence[int]) -> StageOrder:
    """Stages in all orders, with the given number of stages of each device type."""
    present, num_of = np.unique(np.asarray(types), return_counts=True)
    grid = sorted(product(*(range(num + 1) for num in num_of)), key=lambda used: (sum(used), used))
    number = {used: index for index, used in enumerate(grid)}
    steps = []
    for used in grid:
        for index in range(len(present)):
            more = (*used[:index], used[index] + 1, *used[index + 1 :])
            if more in number:
                steps.append((number[used], number[more], sum(used) * len(present) + index))
    src, dst, row = np.array(steps).T
    return _order(
        src, dst, row, np.tile(present, len(types)), np.repeat(in_flight, len(present)), limits
    )


def _order(
    src: LongArray, dst: LongArray, row: LongArray, types: LongArray, in_flight: LongArray,
    limits: Sequence[int],
) -> StageOrder:  # fmt: skip
    # Equal stages share a row, so that their costs are computed once.
    pairs, same = np.unique(np.stack((types, in_flight)), axis=1, return_inverse=True)
    return StageOrder(
        src=table(src, np.int64),
        dst=table(dst, np.int64),
        row=table(same.ravel()[row], np.int64),
        device_type=table(pairs[0], np.int64),
        in_flight=table(pairs[1], np.int64),
        limit_bytes=table(np.asarray(limits)[pairs[0]], np.int64),
    )


# ── times of stages ──────────────────────────────────────────────────────────────────────────────


def _spans(values: NDArray[_T]) -> NDArray[_T]:
    """[start, stop]: sums of values per layer, which are on the last axis."""
    zero = np.zeros((*values.shape[:-1], 1), dtype=values.dtype)
    sums = np.concatenate((zero, np.cumsum(values, axis=-1)), axis=-1)
    spanned: NDArray[_T] = sums[..., None, :] - sums[..., :, None]
    return spanned


def _needs_bytes(costs: LayerCosts, order: StageOrder) -> LongArray:
    """[row, start, stop]: bytes that a stage needs."""
    kept = _spans(np.asarray(costs.activation_bytes, dtype=np.int64))
    state = _spans(np.asarray(costs.state_bytes, dtype=np.int64))
    needs: LongArray = kept[None] * order.in_flight[:, None, None] + state[None]
    return needs


def stage_tables(costs: LayerCosts, order: StageOrder) -> StageTables:
    """Times of all possible stages on all rows of an order."""
    stage_s = _spans(np.ascontiguousarray((costs.forward_s + costs.backward_s).T))
    stage_s = stage_s[order.device_type]
    stage_s[_needs_bytes(costs, order) > order.limit_bytes[:, None, None]] = np.inf
    return _tables(costs, stage_s)


def _tables(costs: LayerCosts, stage_s: FloatArray) -> StageTables:
    counted = pointers(costs.counts)
    sent_s = np.concatenate(([0.0], 2.0 * np.asarray(costs.send_s)))
    sent_s[-1] = 0.0
    return StageTables(
        stage_s=table(stage_s, np.float64),
        sent_s=table(sent_s, np.float64),
        first_stop=table(np.searchsorted(counted, counted + 1), np.int64),
    )


# ── sum plus weighted maximum ────────────────────────────────────────────────────────────────────


def best_cuts(tables: StageTables, order: StageOrder, weight: float) -> Cuts | None:
    """The cuts with the smallest sum plus ``weight`` times the maximum; None if nothing fits.

    The smallest sum S(L) under a limit L on the maximum only falls as L rises, so between two
    limits a < b no cuts are better than S(b) + weight * a. Intervals whose bound is no better than
    the best known cuts are dropped, the others are halved.
    """
    shape = (order.num_nodes, len(tables.sent_s))
    state = CutState(np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    best = _cuts_within(tables, order, state, np.inf)
    if best is None:
        return None
    # Every layer is in some stage: no cuts have a smaller maximum than the longest layer.
    alone = np.diagonal(tables.stage_s, offset=1, axis1=1, axis2=2)
    intervals = [(float(alone.min(axis=0).max()), best.max_s, best.sum_s)]
    while intervals:
        low_s, high_s, sum_s = intervals.pop()
        if sum_s + weight * low_s >= best.total_s(weight) * (1.0 - _PRECISION):
            continue
        middle_s = (low_s + high_s) / 2.0
        cuts = _cuts_within(tables, order, state, middle_s)
        if cuts is None or cuts.sum_s > sum_s * (1.0 + 1e-15):
            intervals.append((middle_s, high_s, sum_s))
        if cuts is not None:
            intervals.append((low_s, cuts.max_s, cuts.sum_s))
            best = min(best, cuts, key=lambda found: found.total_s(weight))
    return _evened(tables, order, state, best)


def _evened(tables: StageTables, order: StageOrder, state: CutState, best: Cuts) -> Cuts:
    """Of equally good cuts, those with the most even stages."""
    if best.max_s <= 0.0:
        return best
    uneven = 1.0 + _PRECISION / best.max_s * tables.stage_s
    marked = tables._replace(stage_s=table(tables.stage_s * uneven, np.float64))
    cuts = _cuts_within(marked, order, state, best.max_s * (1.0 + _PRECISION) * (1.0 + 1e-15))
    return best if cuts is None else _cuts(tables, cuts.starts, cuts.rows)


def _cuts(tables: StageTables, starts: tuple[int, ...], rows: tuple[int, ...]) -> Cuts:
    stage_s = tables.stage_s[list(rows), starts[:-1], starts[1:]]
    sum_s = float(stage_s.sum() + tables.sent_s[list(starts[1:])].sum())
    return Cuts(starts, rows, sum_s, float(stage_s.max()))


def _cuts_within(
    tables: StageTables, order: StageOrder, state: CutState, limit_s: float
) -> Cuts | None:
    from hocket.planners.parallel.layer_partition_kernels import least_sum

    if least_sum(order, tables, state, limit_s) == np.inf:
        return None
    node, stop = order.num_nodes - 1, len(tables.sent_s) - 1
    starts, rows = [stop], []
    while node > 0:
        start, step = int(state.came_from[node, stop]), int(state.came_step[node, stop])
        rows.append(int(order.row[step]))
        starts.append(start)
        node, stop = int(order.src[step]), start
    return _cuts(tables, tuple(reversed(starts)), tuple(reversed(rows)))


# ── one stage per rank ───────────────────────────────────────────────────────────────────────────


def _exact(costs: LayerCosts, order: StageOrder, ranks: PipelineRanks) -> LayerPartition:
    """The best partition with one stage per rank."""
    tables = stage_tables(costs, order)
    simple = best_cuts(tables, order, ranks.num_microbatches - 1)
    if simple is None:
        raise _lacking(costs, order)
    cuts, is_proven = _shortest_cuts(costs, tables, order, ranks.num_microbatches, simple)
    step_s = _path_time(costs, tables, order, ranks.num_microbatches, cuts)
    found = _described(costs, order, cuts.starts, cuts.rows, ranks)
    return replace(found, step_s=step_s, is_optimal=is_proven)


def _shortest_cuts(
    costs: LayerCosts, tables: StageTables, order: StageOrder, num_microbatches: int, known: Cuts
) -> tuple[Cuts, bool]:
    """The cuts with the shortest step, or ``known`` if none is shorter; True if that is proven."""
    from hocket.planners.parallel.layer_partition_kernels import extend_paths

    num_cells = order.num_nodes * (costs.num_layers + 1)
    state = PathState(
        ptr=np.zeros(num_cells, dtype=np.int64),
        stop=np.zeros(num_cells, dtype=np.int64),
        point_s=np.zeros((_MAX_POINTS, 2)),
        came=np.zeros((_MAX_POINTS, 3), dtype=np.int64),
        is_full=np.zeros(1, dtype=np.int64),
    )
    limit_s = _path_time(costs, tables, order, num_microbatches, known) * _LESS
    extend_paths(order, tables, _path_table(costs, order, num_microbatches), state, limit_s)
    found = range(int(state.ptr[0]), int(state.stop[0]))
    is_proven = not state.is_full[0]
    if not found:
        return known, is_proven
    point = min(found, key=lambda point: float(state.point_s[point, 1]))
    starts, rows = [0], []
    while point >= 0:
        step, stop, point = (int(value) for value in state.came[point])
        if step < 0:
            break
        starts.append(stop)
        rows.append(int(order.row[step]))
    return _cuts(tables, tuple(starts), tuple(rows)), is_proven


def _forward_sums(costs: LayerCosts) -> FloatArray:
    zero = np.zeros((1, np.shape(costs.forward_s)[1]))
    return np.concatenate((zero, np.cumsum(costs.forward_s, axis=0))).T


def _path_time(
    costs: LayerCosts, tables: StageTables, order: StageOrder, num_microbatches: int, cuts: Cuts
) -> float:
    """Step time of given cuts."""
    forward = _forward_sums(costs)
    behind_s, step_s = 0.0, 0.0
    for stage in range(len(cuts.rows) - 1, -1, -1):
        row, start, stop = cuts.rows[stage], cuts.starts[stage], cuts.starts[stage + 1]
        stage_s, kind = float(tables.stage_s[row, start, stop]), int(order.device_type[row])
        forward_s = float(forward[kind, stop] - forward[kind, start])
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
    """Seconds from a stage's first forward to its last backward, including its waits."""
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


def _path_table(costs: LayerCosts, order: StageOrder, num_microbatches: int) -> PathTable:
    types = np.unique(order.device_type)
    fastest_s = (costs.forward_s + costs.backward_s)[:, types].min(axis=1)
    return PathTable(
        forward_sums=table(_forward_sums(costs), np.float64),
        before_s=table(np.concatenate(([0.0], np.cumsum(fastest_s))), np.float64),
        step_ptr=table(np.searchsorted(order.src, np.arange(order.num_nodes + 1)), np.int64),
        num_microbatches=num_microbatches,
    )


# ── several stages per rank ──────────────────────────────────────────────────────────────────────
#
# A rank's work and memory are then sums over stages that are far apart in the model, which a
# programme over prefixes does not see. Stages are first made equal, then layers are moved away from
# the rank that lacks most memory or is slowest, each time to the stage where that helps most; the
# stages between pass one layer on. O(moves x stages²).


class _Chunked(NamedTuple):
    """Inputs of the descent for several stages per rank."""

    costs: LayerCosts
    ranks: PipelineRanks
    stage_s: FloatArray
    """[stage, start, stop]: seconds of a stage."""
    needs_bytes: LongArray
    """[stage, start, stop]: bytes that a stage needs."""
    limit_bytes: LongArray
    """[rank]: memory of one device."""
    first_stop: LongArray


def _with_chunks(costs: LayerCosts, order: StageOrder, ranks: PipelineRanks) -> LayerPartition:
    num_chunks = len(ranks.rank_of_stage) // len(ranks.device_types)
    weight = num_chunks * (num_chunks * ranks.num_microbatches - 1.0)
    no_limit = np.full_like(order.limit_bytes, 2**62)
    # Memory counts for the rank as a whole; equal parts of it help where that finds nothing.
    for limit in (no_limit, order.limit_bytes // num_chunks):
        tables = stage_tables(costs, order._replace(limit_bytes=table(limit, np.int64)))
        cuts = best_cuts(tables, order, weight)
        if cuts is None:
            continue
        limits = [ranks.memory_bytes[each] for each in ranks.device_types]
        chunked = _Chunked(
            costs, ranks, tables.stage_s[order.row], _needs_bytes(costs, order)[order.row],
            np.array(limits, dtype=np.int64), tables.first_stop,
        )  # fmt: skip
        starts = _descend(chunked, list(cuts.starts))
        lack_bytes, step_s, _ = _value(chunked, starts)
        if lack_bytes == 0:
            found = _described(costs, order, tuple(starts), tuple(order.row.tolist()), ranks)
            return replace(found, step_s=step_s)
    raise _lacking(costs, order._replace(limit_bytes=order.limit_bytes // num_chunks))


def _descend(chunked: _Chunked, starts: list[int]) -> list[int]:
    """Move single layers between stages as long as that improves `_value`."""
    best = _value(chunked, starts)
    for _ in range(_MAX_MOVES):
        moved = [trial for trial in _moves(chunked, starts) if _is_legal(chunked, trial)]
        values = [_value(chunked, trial) for trial in moved]
        if not values or not min(values) < best:
            break
        best = min(values)
        starts = moved[values.index(best)]
    return starts


def _moves(chunked: _Chunked, starts: list[int]) -> Iterator[list[int]]:
    """Yield partitions with one layer moved from a stage of the worst rank to another stage."""
    held_bytes, rank_s = _rank_sums(chunked, starts)
    lack_bytes = held_bytes - chunked.limit_bytes
    worst = int(np.argmax(lack_bytes)) if lack_bytes.max() > 0 else int(np.argmax(rank_s))
    rank_of_stage = chunked.ranks.rank_of_stage
    for src, rank in enumerate(rank_of_stage):
        for dst in range(len(rank_of_stage)):
            if rank == worst and src != dst:
                first, last = min(src, dst) + 1, max(src, dst)
                shift = -1 if dst > src else 1
                passed = [start + shift for start in starts[first : last + 1]]
                yield [*starts[:first], *passed, *starts[last + 1 :]]


def _is_legal(chunked: _Chunked, starts: list[int]) -> bool:
    """True if every stage has a layer that counts."""
    begins, ends = np.array(starts[:-1]), np.array(starts[1:])
    return bool(np.all(begins < ends) and np.all(chunked.first_stop[begins] <= ends))


def _value(chunked: _Chunked, starts: list[int]) -> tuple[int, float, float]:
    """Objective, lower is better: bytes that ranks lack, the step time, unevenness of the ranks.

    With v stages per rank the last microbatches wait for only 1/v of the stages. So the sum has
    weight 1/v and the slowest rank m - 1/v, which for equal stages is the known bubble of
    interleaved schedules.
    """
    held_bytes, rank_s = _rank_sums(chunked, starts)
    lack_bytes = int(np.maximum(held_bytes - chunked.limit_bytes, 0).sum())
    num_chunks = len(chunked.ranks.rank_of_stage) // len(rank_s)
    sent_s = 2.0 * np.asarray(chunked.costs.send_s)[np.array(starts[1:-1]) - 1].sum()
    path_s = (rank_s.sum() + sent_s) / num_chunks
    step_s = float(path_s + (chunked.ranks.num_microbatches - 1.0 / num_chunks) * rank_s.max())
    return lack_bytes, step_s, float(np.square(rank_s).sum())


def _rank_sums(chunked: _Chunked, starts: list[int]) -> tuple[LongArray, FloatArray]:
    """Bytes that each rank needs, and its seconds per microbatch."""
    ranks, stages = list(chunked.ranks.rank_of_stage), np.arange(len(starts) - 1)
    held_bytes, rank_s = np.zeros_like(chunked.limit_bytes), np.zeros(len(chunked.limit_bytes))
    np.add.at(held_bytes, ranks, chunked.needs_bytes[stages, starts[:-1], starts[1:]])
    np.add.at(rank_s, ranks, chunked.stage_s[stages, starts[:-1], starts[1:]])
    return held_bytes, rank_s


# ── the result ───────────────────────────────────────────────────────────────────────────────────


def _described(
    costs: LayerCosts, order: StageOrder, starts: tuple[int, ...], rows: tuple[int, ...],
    ranks: PipelineRanks,
) -> LayerPartition:  # fmt: skip
    """The partition with the given cuts; its step time is still to be set."""
    begins, ends = starts[:-1], starts[1:]
    layer_s = _spans(np.ascontiguousarray((costs.forward_s + costs.backward_s).T))
    needs = _needs_bytes(costs, order)[list(rows), begins, ends]
    types, peak_bytes = np.zeros((2, len(ranks.device_types)), dtype=np.int64)
    types[list(ranks.rank_of_stage)] = order.device_type[list(rows)]
    np.add.at(peak_bytes, list(ranks.rank_of_stage), needs)
    return LayerPartition(
        starts=starts,
        layers=tuple(np.diff(pointers(costs.counts)[list(starts)]).tolist()),
        device_types=tuple(types.tolist()),
        stage_s=tuple(layer_s[order.device_type[list(rows)], begins, ends].tolist()),
        peak_bytes=tuple(peak_bytes.tolist()),
        step_s=np.inf,
        is_optimal=False,
    )


def _lacking(costs: LayerCosts, order: StageOrder) -> NoFeasiblePlanError:
    """Error on the stage that lacks the most memory, in the partition that lacks the least."""
    lack = np.maximum(_needs_bytes(costs, order) - order.limit_bytes[:, None, None], 0)
    cuts = best_cuts(_tables(costs, lack.astype(np.float64)), order, 1e9)
    if cuts is None:
        raise UsageError(
            f"{int(np.sum(costs.counts))} layers are too few for the stages",
            hint="use fewer stages: each needs a layer",
        )
    lacks = [lack[row, *cuts.starts[i : i + 2]] for i, row in enumerate(cuts.rows)]
    worst = int(np.argmax(lacks))
    return NoFeasiblePlanError(
        f"stage {worst} lacks {format_bytes(float(lacks[worst]))} of memory in every partition of"
        f" the layers over {len(lacks)} stages",
        hint="recompute more, keep fewer microbatches in flight, or use more devices",
    )
