"""A schedule made for given stage times and memory limits, never worse than the known ones.

The known schedules of the same stage layout that fit are simulated; then a list scheduler (see
`greedy_kernel`) is run with a few hundred ways to choose, and the best of them is changed at random
from a fixed seed as long as that helps. In the spirit of the automatic schedules of Qi et al.,
"Zero bubble pipeline parallelism" (ICLR 2024), for unequal stages, transfers and limits per device.
O(tries * actions * (devices + microbatches in flight)); how many tries depends on the size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hocket.base.arrays import IntArray, pointers
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.cost.parallel.costs import StageCosts
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallelism.schedules.bound import lower_bound_s
from hocket.planners.parallelism.schedules.greedy_tables import (
    GreedyState,
    PipelineTable,
    new_state,
    pipeline_table,
)
from hocket.planners.parallelism.schedules.join import joined
from hocket.planners.parallelism.schedules.make import known_schedules
from hocket.planners.parallelism.schedules.policies import (
    SchedulePolicy,
    changed,
    following,
    policies,
)
from hocket.planners.parallelism.schedules.rows import folded, looped
from hocket.simulate.pipeline import check_costs, simulate_pipeline

_MAX_WORK = 1_500_000
"""Actions over all tries, which bounds the time."""
_MIN_TRIES, _MAX_TRIES = 24, 900
_CLOSE = 1 + 1e-9
"""Makespans within this are the same: sums of the same times in another order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Task:
    """What is to be scheduled."""

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
    ``split_backward`` no backward is split. Raises `NoFeasiblePlanError` where a device has not
    even room for one microbatch.
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
    _check_room(pipeline, task)
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


def _check_room(pipeline: PipelineTable, task: _Task) -> None:
    """One microbatch is on all of a device's stages before its backward begins."""
    need = pipeline.whole_bytes
    lacks = need - pipeline.room_bytes
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
    from hocket.planners.parallelism.schedules.greedy_kernel import list_schedule

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
    """``count`` ways to choose, and those that follow a known schedule as far as memory allows."""
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
