"""The ways to choose that the list scheduler tries: how far ahead forwards go, how late weights.

A pipeline without waits needs as many microbatches in flight on a stage as fit into the time from
a forward to its backward, so limits are that count for this pipeline's times, more and less, and
those of the known schedules; other policies follow the order of a schedule. O(actions) each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hocket.base.arrays import LongArray
from hocket.kernels.containers import table
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallelism.schedules.bound import round_trips_s
from hocket.planners.parallelism.schedules.greedy_tables import PipelineTable, PolicyTable

FORWARD_FIRST, BACKWARD_FIRST, BY_TURNS = 0, 1, 2
_INPUT_WORKS = (StageWork.BACKWARD, StageWork.INPUT_GRADIENT)
_WEIGHT_WORKS = (StageWork.BACKWARD, StageWork.WEIGHT_GRADIENT)
_NO_POSITION = np.zeros((3, 1, 1), dtype=np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class SchedulePolicy:
    """One way to choose; the fields are those of `PolicyTable`."""

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
    fits = pipeline.room_bytes / np.maximum(pipeline.whole_bytes, 1)
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
