"""A schedule made for given stage times and memory limits, never worse than the known ones.

The known schedules of the same stage layout that fit are simulated; then a list scheduler (see
`greedy_kernel`) is run with a few hundred policies, and the best of them is changed at random from
a fixed seed as long as that helps. In the spirit of the automatic schedules of Qi et al.,
"Zero bubble pipeline parallelism" (ICLR 2024), for unequal stages, transfers and limits per device.
O(tries * actions * (devices + microbatches in flight)); how many tries depends on the size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.cost.parallel.costs import StageCosts
from hocket.kernels.containers import table
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallel.schedules.greedy_tables import (
    GreedyState,
    PipelineTable,
    PolicyTable,
    new_state,
    pipeline_table,
)
from hocket.planners.parallel.schedules.make import known_schedules
from hocket.planners.parallel.schedules.rows import folded, looped
from hocket.simulate.pipeline import check_costs, simulate_pipeline

# How long a pipeline takes at least, whatever its schedule.
#
# A device cannot start before the first microbatch has come to it, then has all its own work to do;
# and the last backward on it still has to go back to the first stage. A microbatch stays on a stage
# at least as long as it takes to the end of the model and back, so the bytes it holds over that
# time must fit into the device's memory times the makespan. O(stages).


def lower_bound_s(pipeline: PipelineTable, *, split_backward: bool) -> float:
    """No schedule of the pipeline is shorter."""
    forward_s, total_s, input_s, weight_s = pipeline.duration_s
    back_s = input_s if split_backward else total_s
    after_first_s = float(pipeline.after_s[pipeline.device_of_stage[0]])
    last_s = (float(weight_s[0]) if split_backward else 0.0) + after_first_s
    sends_s = pipeline.send_s[:-1]
    head_s = np.concatenate(([0.0], np.cumsum(forward_s[:-1] + sends_s)))
    tail_s = np.concatenate(([0.0], np.cumsum(back_s[:-1] + sends_s))) + last_s
    own, first, count = pipeline.stage_of, pipeline.stage_of[:, 0], pipeline.num_microbatches
    all_s = count * (forward_s + total_s)[own].sum(axis=1)
    path_s = count * (forward_s + back_s)[own].sum(axis=1)
    trips_s = round_trips_s(pipeline, split_backward=split_backward)
    held_byte_s = count * (pipeline.held_bytes * trips_s)[own].sum(axis=1)
    held_s = held_byte_s / np.maximum(pipeline.free_bytes, 1)
    ends_s = head_s[first] + np.maximum(path_s, held_s) + tail_s[first]
    one_s = trips_s[0] + last_s
    return float(max(np.max(head_s[first] + all_s + pipeline.after_s), np.max(ends_s), one_s))


def round_trips_s(pipeline: PipelineTable, *, split_backward: bool) -> FloatArray:
    """Per stage: time from the start of a forward to the end of its backward, nobody waiting."""
    there_s = pipeline.duration_s[0] + pipeline.duration_s[2 if split_backward else 1]
    sends_s = np.append(2 * pipeline.send_s[:-1], 0.0)
    return np.cumsum((there_s + sends_s)[::-1])[::-1]


# Policies that the list scheduler tries: how far ahead forwards run, how late weight gradients are.
#
# A pipeline without waits needs as many microbatches in flight on a stage as fit into the time from
# a forward to its backward, so limits are that count for this pipeline's times, more and less, and
# those of the known schedules; other policies follow the order of a schedule. O(actions) each.

FORWARD_FIRST, BACKWARD_FIRST, BY_TURNS = 0, 1, 2
_INPUT_WORKS = (StageWork.BACKWARD, StageWork.INPUT_GRADIENT)
_WEIGHT_WORKS = (StageWork.BACKWARD, StageWork.WEIGHT_GRADIENT)
_NO_POSITION = np.zeros((3, 1, 1), dtype=np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class SchedulePolicy:
    """A policy of the list scheduler; the fields are those of `PolicyTable`."""

    max_in_flight: LongArray
    max_late: LongArray
    preference: int
    group: int
    deepest_first: bool
    patience: float
    position: LongArray | None = None
    """Positions to follow instead of preference, group and depth, if any."""

    def as_table(self) -> PolicyTable:
        """The policy for compiled code."""
        return PolicyTable(
            max_in_flight=table(self.max_in_flight, np.int64),
            max_late=table(self.max_late, np.int64),
            preference=self.preference,
            group=self.group,
            deepest_first=int(self.deepest_first),
            follows=int(self.position is not None),
            position=table(_NO_POSITION if self.position is None else self.position, np.int64),
            patience=float(self.patience),
        )


def policies(pipeline: PipelineTable, *, split_backward: bool) -> Iterator[SchedulePolicy]:
    """All that are tried, in an order of which every beginning is a fair sample."""
    num_devices, chunks = pipeline.stage_of.shape
    count = pipeline.num_microbatches
    device = np.arange(num_devices)
    lates = [np.full(num_devices, chunks * count), 2 * device, device, np.zeros(num_devices)]
    orders = [(1, True), (num_devices, True), (count, True), (num_devices, False), (count, False)]
    generator = np.random.default_rng(0)
    for max_late in lates if split_backward else lates[:1]:
        choices = list(
            product(
                [FORWARD_FIRST, BACKWARD_FIRST, BY_TURNS],
                orders if chunks > 1 else orders[:1],
                [0.0, 0.5, 1.0] if split_backward else [0.0],
                _limits(pipeline, split_backward=split_backward),
            )
        )
        for index in generator.permutation(len(choices)).tolist():
            preference, (group, deepest_first), patience, in_flight = choices[index]
            yield SchedulePolicy(
                max_in_flight=in_flight,
                max_late=max_late,
                preference=preference,
                group=group,
                deepest_first=deepest_first,
                patience=patience,
            )


def following(schedule: Schedule, patience: float) -> SchedulePolicy:
    """Take what is ready in the order of a schedule, and what waits as soon as it is ready."""
    num_stages, count = schedule.num_stages, schedule.num_microbatches
    # A whole backward is both halves, one after the other.
    place = 2 * (
        np.arange(len(schedule.work)) - np.repeat(schedule.start[:-1], np.diff(schedule.start))
    )
    position = np.zeros((3, num_stages, count), dtype=np.int64)
    for kind, works in enumerate(((StageWork.FORWARD,), _INPUT_WORKS, _WEIGHT_WORKS)):
        at = np.isin(schedule.work, works)
        late = (kind == 2) & (schedule.work[at] == StageWork.BACKWARD)
        position[kind, schedule.stage[at], schedule.microbatch[at]] = place[at] + late
    return SchedulePolicy(
        max_in_flight=np.full(num_stages, count),
        max_late=np.full(schedule.num_devices, num_stages * count),
        preference=FORWARD_FIRST,
        group=1,
        deepest_first=True,
        patience=patience,
        position=position,
    )


def _limits(pipeline: PipelineTable, *, split_backward: bool) -> list[LongArray]:
    """Limits of microbatches in flight per stage, none twice."""
    count = pipeline.num_microbatches
    per_device_s = pipeline.duration_s[:2].sum(axis=0)[pipeline.stage_of].sum(axis=1)
    period_s = max(float(per_device_s.max()), 1e-30)
    need = round_trips_s(pipeline, split_backward=split_backward) / period_s
    behind = len(need) - np.arange(len(need))
    fits = pipeline.free_bytes / np.maximum(pipeline.total_bytes, 1)
    fits = fits[pipeline.device_of_stage]
    found = [np.full(len(need), count), np.ceil(need), np.ceil(need) + 1, np.ceil(1.5 * need)]
    found += [np.ceil(2 * need), behind, 2 * behind - 1, np.ceil(need) + 3]
    found += [np.floor(fits), np.floor(1.5 * fits)]
    unique = {tuple(np.clip(limit, 1, count).astype(np.int64).tolist()): None for limit in found}
    return [np.array(limit, dtype=np.int64) for limit in unique]


def changed(policy: SchedulePolicy, generator: np.random.Generator, count: int) -> SchedulePolicy:
    """The policy with one random change."""
    if policy.position is not None and generator.random() < 0.75:
        return replace(policy, position=_moved(policy.position, generator))
    change = generator.integers(8)
    if change < 4:
        limit = policy.max_in_flight.copy()
        stage = int(generator.integers(len(limit)))
        span = slice(stage, stage + 1) if change < 2 else slice(0, stage + 1)
        step = generator.choice([-2, -1, 1, 2])
        limit[span] = np.clip(limit[span] + step, 1, count)
        return replace(policy, max_in_flight=limit)
    if change < 7:
        late = np.minimum(policy.max_late, count)
        device = int(generator.integers(len(late)))
        span = slice(device, device + 1) if change < 6 else slice(device, len(late))
        late[span] = np.maximum(late[span] + generator.choice([-2, -1, 1, 2]), 0)
        return replace(policy, max_late=late)
    return replace(policy, patience=float(generator.choice([0.0, 0.25, 0.5, 0.75, 1.0])))


def _moved(position: LongArray, generator: np.random.Generator) -> LongArray:
    """Positions with those of one stage and kind of work moved, from some microbatch on."""
    moved = position.copy()
    kind, stage, first = (int(generator.integers(size)) for size in position.shape)
    step = int(generator.choice([-9, -5, -3, -1, 1, 3, 5, 9]))
    form = generator.integers(3)
    span = (slice(None), slice(first, None), slice(first, first + 1))[form]
    moved[kind, stage, span] += step
    return moved


# Make whole backwards of halves that follow each other, where that takes no longer.
#
# A runtime does a whole backward faster than its halves, and some can do nothing else together with
# data parallelism. Joining delays the gradient of the inputs by that of the weights, so sets of
# pairs are joined only if the makespan stays: all of a stage, or else halves of these, within a
# number of tries. O(tries * actions).

_JOIN_TRIES = 64
_JOIN_CLOSE = 1 + 1e-12


def joined(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The schedule with many whole backwards, as far as its makespan allows."""
    limit_s = simulate_pipeline(schedule, costs).makespan_s * _JOIN_CLOSE
    pairs = _pairs(schedule)
    stage = schedule.stage[pairs]
    waiting = [pairs, *(pairs[stage == own] for own in np.unique(stage).tolist())]
    chosen = np.zeros(0, dtype=np.int64)
    for _ in range(_JOIN_TRIES):
        if not waiting:
            break
        some = waiting.pop(0)
        together = np.union1d(chosen, some)
        if len(together) == len(chosen):
            continue
        if simulate_pipeline(_with_joined(schedule, together), costs).makespan_s <= limit_s:
            chosen = together
        elif len(some) > 1 and len(some) < len(pairs):
            waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
    return _with_joined(schedule, chosen)


def _pairs(schedule: Schedule) -> NDArray[np.int64]:
    """Gradients of inputs that are followed by that of the weights of the same microbatch."""
    work, stage, microbatch = schedule.work, schedule.stage, schedule.microbatch
    # The last and first action of two devices never pair: their stages differ.
    return np.flatnonzero(
        (work[:-1] == StageWork.INPUT_GRADIENT)
        & (work[1:] == StageWork.WEIGHT_GRADIENT)
        & (stage[:-1] == stage[1:])
        & (microbatch[:-1] == microbatch[1:])
    )


def _with_joined(schedule: Schedule, pairs: NDArray[np.int64]) -> Schedule:
    """The schedule with whole backwards instead of the pairs that begin at these actions."""
    if not len(pairs):
        return schedule
    work = schedule.work.copy()
    work[pairs] = StageWork.BACKWARD
    kept = np.ones(len(work), dtype=np.bool_)
    kept[pairs + 1] = False
    before = pointers(kept)
    return replace(
        schedule,
        start=before[schedule.start].astype(np.int32),
        work=work[kept],
        stage=schedule.stage[kept],
        microbatch=schedule.microbatch[kept],
    )


_MAX_WORK = 1_500_000
"""Actions over all tries, which bounds the time."""
_MIN_TRIES, _MAX_TRIES = 24, 900
_CLOSE = 1 + 1e-9
"""Makespans within this are the same: sums of the same times in another order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Task:
    """Input of one synthesis: stage costs, microbatches, memory limits and layout."""

    costs: StageCosts
    num_microbatches: int
    memory_bytes: Sequence[int]
    is_folded: bool
    split_backward: bool

    @property
    def num_devices(self) -> int:
        return len(self.costs.state_bytes)

    @property
    def chunks(self) -> int:
        return len(self.costs.forward_s) // self.num_devices

    @property
    def layout(self) -> IntArray:
        return folded(self.num_devices) if self.is_folded else looped(self.num_devices, self.chunks)


def synthesise(
    costs: StageCosts,
    num_microbatches: int,
    memory_bytes: Sequence[int],
    *,
    is_folded: bool = False,
    split_backward: bool = True,
) -> Schedule:
    """A schedule within ``memory_bytes`` per device, as short as any known one that fits.

    Stages are laid over the devices in rounds, or, if ``is_folded``, there and back as a V. Without
    ``split_backward`` no backward is split. Raises `NoFeasiblePlanError` where a device cannot
    hold even one microbatch.
    """
    task = _Task(
        costs=costs,
        num_microbatches=num_microbatches,
        memory_bytes=memory_bytes,
        is_folded=is_folded,
        split_backward=split_backward,
    )
    _check(task)
    pipeline = pipeline_table(costs, num_microbatches, memory_bytes, task.layout)
    _check_memory(pipeline, task)
    known, known_s = _best_known(task)
    enough_s = lower_bound_s(pipeline, split_backward=split_backward) * _CLOSE
    found, found_s = _search(pipeline, task, enough_s, known_s)
    if known is not None and known_s <= found_s * _CLOSE:
        return known
    assert found is not None, "the list scheduler always ends with a schedule"
    return joined(found, costs)


def _check(task: _Task) -> None:
    num_devices, num_stages = task.num_devices, len(task.costs.forward_s)
    if not num_devices or num_stages % num_devices or (task.is_folded and task.chunks != 2):
        shape = "a V of two stages per device" if task.is_folded else "rounds over all devices"
        raise UsageError(f"{num_stages} stages on {num_devices} devices do not make {shape}")
    check_costs(task.costs, num_stages, num_devices)
    if task.num_microbatches < 1 or len(task.memory_bytes) != num_devices:
        raise UsageError(
            f"{task.num_microbatches} microbatches and {len(task.memory_bytes)} memory limits do "
            f"not make a pipeline of {num_devices} devices"
        )


def _check_memory(pipeline: PipelineTable, task: _Task) -> None:
    """One microbatch is on all of a device's stages before its backward begins."""
    need = pipeline.total_bytes
    lacks = need - pipeline.free_bytes
    device = int(np.argmax(lacks))
    if lacks[device] > 0:
        total = int(need[device]) + task.costs.state_bytes[device]
        raise NoFeasiblePlanError(
            f"device {device} of the pipeline lacks {format_bytes(int(lacks[device]))}: its state "
            f"and one microbatch take {format_bytes(total)} of "
            f"{format_bytes(task.memory_bytes[device])}",
            hint="recompute activations, use smaller microbatches or more stages",
        )


def _best_known(task: _Task) -> tuple[Schedule | None, float]:
    """The shortest known schedule that fits, and its makespan."""
    best, best_s = None, np.inf
    for schedule in _known(task):
        if schedule.splits_backward and not task.split_backward:
            continue
        timeline = simulate_pipeline(schedule, task.costs)
        fits = bool(np.all(timeline.peak_bytes <= np.asarray(task.memory_bytes)))
        if fits and timeline.makespan_s * _CLOSE < best_s:
            best, best_s = schedule, timeline.makespan_s
    return best, best_s


def _known(task: _Task) -> Iterator[Schedule]:
    return known_schedules(
        task.num_devices, task.num_microbatches, task.chunks, is_folded=task.is_folded
    )


def _search(
    pipeline: PipelineTable, task: _Task, enough_s: float, known_s: float
) -> tuple[Schedule | None, float]:
    """The shortest schedule of the list scheduler, and its makespan; stops at ``enough_s``."""
    from hocket.planners.parallel.schedules.greedy_kernel import list_schedule

    state = new_state(pipeline)
    backward = int(StageWork.INPUT_GRADIENT if task.split_backward else StageWork.BACKWARD)

    def makespan_s(policy: SchedulePolicy) -> float:
        return float(list_schedule(pipeline, policy.as_table(), state, backward))

    num_tries = _num_tries(pipeline)
    best, best_s = None, np.inf
    for policy in _first_policies(pipeline, task, num_tries // 2):
        if min(best_s, known_s) <= enough_s:
            break
        if (time_s := makespan_s(policy)) < best_s:
            best, best_s = policy, time_s
    if best is None:
        return None, np.inf
    generator = np.random.default_rng(0)
    for _ in range(num_tries // 2):
        if min(best_s, known_s) <= enough_s:
            break
        policy = changed(best, generator, task.num_microbatches)
        # Steps to equally good policies lead off plateaus.
        if (time_s := makespan_s(policy)) <= best_s:
            best, best_s = policy, time_s
    makespan_s(best)
    return _scheduled(state, task), best_s


def _first_policies(pipeline: PipelineTable, task: _Task, count: int) -> Iterator[SchedulePolicy]:
    """``count`` policies, and those that follow a known schedule as far as memory allows."""
    for schedule in _known(task):
        for patience in (0.0, 0.5, 1.0):
            yield following(schedule, patience)
    yield from islice(policies(pipeline, split_backward=task.split_backward), count)


def _num_tries(pipeline: PipelineTable) -> int:
    num_actions = 3 * pipeline.num_microbatches * len(pipeline.device_of_stage)
    return int(np.clip(_MAX_WORK // num_actions, _MIN_TRIES, _MAX_TRIES))


def _scheduled(state: GreedyState, task: _Task) -> Schedule:
    """The rows that the list scheduler wrote last."""
    is_used = np.arange(state.rows.shape[2]) < state.row_size[:, None]
    work, stage, microbatch = state.rows[:, is_used]
    return Schedule(
        name="synthesised",
        num_microbatches=task.num_microbatches,
        device_of_stage=task.layout,
        start=pointers(state.row_size).astype(np.int32),
        work=work,
        stage=stage,
        microbatch=microbatch,
    )
