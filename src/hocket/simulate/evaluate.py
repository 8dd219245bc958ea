"""Evaluate many plans of one problem: the scores of `simulate`, without its timeline.

Plans are lowered into the same arrays each time, and a sequence of changes is tried in compiled
code, so an evaluation of a small graph takes a tenth of the time of a simulation. The results are
bit-identical. A change whose step is certain to be longer than the current one is abandoned early:
as soon as an op starts so late that the longest path from it, or the remaining work of its stream,
exceeds the limit. O(lowering + simulation) per change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.base.errors import UsageError
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.events import run
from hocket.simulate.instructions import Given, PlaceTable, RunTable
from hocket.simulate.lowering import LoweringBuffers, lower_into, new_buffers, order_priority
from hocket.simulate.state import EngineState, Spans, new_state

_NOISE = 1e-9
"""Relative difference of step times that counts as rounding."""


class Score(NamedTuple):
    """Score of a plan, compared field by field; smaller is better."""

    overflow_bytes: float
    """Bytes by which devices exceed their memory, summed; infinite if the plan deadlocks."""
    step_s: float
    """Step time; infinite if a strict order makes ops wait for each other."""
    moved_bytes: float
    """Bytes of all transfers."""


class Changes(NamedTuple):
    """Changes to try: change c is about ops ``op[ptr[c]:ptr[c + 1]]``, each at most once."""

    ptr: LongArray
    op: LongArray
    device: LongArray
    """New device of each op."""
    priority: FloatArray
    """New priority of each op; NaN to keep the old one."""
    partner: LongArray
    """Op with which it exchanges priorities, which is then its only change; -1 for none."""
    tolerance: FloatArray
    """Per change: accepted if its step is shorter than the current one times this factor."""


class ChangeWalk(NamedTuple):
    """State and result of trying a sequence of changes."""

    present: FloatArray
    """Current score, with which changes are compared."""
    stops: BoolArray
    """One value: True to stop at the first accepted change, False to continue from it."""
    best: FloatArray
    """Best score found."""
    best_device: LongArray
    best_priority: FloatArray


_WORST = Score(np.inf, np.inf, np.inf)


class Evaluator:
    """Evaluates plans of one problem, one at a time.

    ``score``, ``op_start_s``, ``op_end_s`` and ``peak_bytes`` describe the latest evaluation and
    are overwritten by the next. They are meaningless after changes none of which was accepted,
    since the last change may have been abandoned.
    """

    def __init__(self, problem: Problem, devices: IntArray | None = None) -> None:
        """``devices`` are the devices that plans may use, all by default."""
        self.buffers: LoweringBuffers = new_buffers(problem, devices)
        self.state: EngineState = new_state(self.buffers.tables)
        self.op_start_s: FloatArray = self.state.spans.op_start_s
        self.op_end_s: FloatArray = self.state.spans.op_end_s
        self.peak_bytes: LongArray = self.state.memory.peak
        self._score = np.zeros(3)
        self._no_change = changes_of(zeros(2), zeros(0), zeros(0), np.zeros(0))

    @property
    def runs(self) -> RunTable:
        """Table of the ops as they were evaluated last."""
        return self.buffers.tables.runs

    def __call__(
        self, device_of: IntArray, priority: FloatArray | None = None, *, is_strict: bool = False
    ) -> Score:
        """Return the score of a placement.

        Devices run ready ops by priority (smallest first; the position in the graph by default), or
        with ``is_strict`` all their ops in exactly that order. Every op must be on an existing
        device that can run it.
        """
        # Written into the engine's own arrays, which avoids allocation for every plan.
        self.runs.device[:] = device_of
        self.runs.priority[:] = np.arange(len(self.runs.device)) if priority is None else priority
        self.first_better(self._no_change, _WORST, is_strict=is_strict)
        return self.score

    def plan(self, plan: Plan) -> Score:
        """Return the score of a plan."""
        if plan.device_of is None:
            raise UsageError(
                "the plan does not say where ops run", hint="run a placement planner first"
            )
        if plan.by_device is None:
            return self(plan.device_of, plan.priority)
        return self(plan.device_of, order_priority(plan.by_device), is_strict=True)

    def first_better(self, changes: Changes, best: Score, *, is_strict: bool = False) -> int:
        """Apply changes to the latest placement, one at a time, until one is better than ``best``.

        Returns its number and keeps it in ``runs``, or returns -1 if none is better. Overwrites
        ``changes``.
        """
        return self._try(changes, best, stops=True, is_strict=is_strict)[1]

    def walk(self, changes: Changes, start: Score) -> tuple[Score, IntArray, FloatArray]:
        """Apply changes to the latest placement one after another, keeping each that is accepted.

        Returns score, devices and priorities of the best placement; the score is infinite if no
        change was accepted. Overwrites ``changes``.
        """
        walk, _ = self._try(changes, start, stops=False, is_strict=False)
        device_of = walk.best_device.astype(np.int32)
        return Score(*walk.best.tolist()), device_of, walk.best_priority

    def _try(
        self, changes: Changes, start: Score, *, stops: bool, is_strict: bool
    ) -> tuple[ChangeWalk, int]:
        num_ops = 0 if stops else len(self.runs.device)
        walk = ChangeWalk(
            present=np.array(start),
            stops=np.array([stops]),
            best=np.array(_WORST),
            best_device=zeros(num_ops),
            best_priority=np.zeros(num_ops),
        )
        found = try_changes(self.buffers, self.state, changes, walk, self._score, is_strict)
        return walk, found

    @property
    def score(self) -> Score:
        """Score of the latest evaluation."""
        return Score(*self._score.tolist())


def changes_of(ptr: LongArray, op: LongArray, device: LongArray, priority: FloatArray) -> Changes:
    """Return changes that are accepted only if they improve the score."""
    return Changes(ptr, op, device, priority, np.full(len(op), -1), np.ones(len(ptr) - 1))


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────


@kernel
def _reset(state: EngineState, places: PlaceTable, runs: RunTable, size_ptr: LongArray) -> None:
    """Set the state to the start of a step."""
    spans, memory, flow, schedule = state
    spans.op_end_s[:] = np.nan
    for device in range(len(places.start_bytes)):
        memory.now[device] = memory.peak[device] = places.start_bytes[device]
        memory.log_bytes[device] = places.start_bytes[device]
        memory.last[device] = memory.log_device[device] = device
        memory.log_time_s[device] = 0.0
    memory.size[0] = len(places.start_bytes)
    for route in range(len(flow.rate)):
        flow.heaps.ptr[route] = size_ptr[route]
    flow.heaps.size[:] = 0
    flow.is_stale[:] = False
    flow.next_s[:] = np.inf
    flow.num_on[:] = 0
    flow.num_active[:] = 0
    flow.changed.has[:] = False
    flow.changed.size[0] = 0
    for queue in range(len(schedule.cursor)):
        schedule.ready.ptr[queue] = schedule.cursor[queue] = runs.lineup_ptr[queue]
    schedule.ready.size[:] = 0
    schedule.user_ptr[:] = 0
    schedule.events.size[0] = 0
    schedule.touched.has[:] = False
    schedule.touched.size[0] = 0
    schedule.is_free[:] = True
    schedule.queue_free_s[:] = 0.0
    schedule.host_free_s[:] = 0.0
    schedule.num_starting[0] = 0


@kernel
def _take_score(
    given: Given, spans: Spans, peak: LongArray, tensors: LongArray, num: int, score: FloatArray
) -> None:
    step_s, moved, over = 0.0, 0.0, 0.0
    for op in range(len(spans.op_end_s)):
        step_s = max(step_s, spans.op_end_s[op])
        # NaN if an order makes ops wait for each other: then the step has no end.
        if np.isnan(spans.op_end_s[op]):
            step_s = np.inf
    for transfer in range(num):
        if step_s < np.inf:
            step_s = max(step_s, spans.transfer_end_s[transfer])
        moved += given.tensor_bytes[tensors[transfer]]
    for device in range(len(peak)):
        over += max(peak[device] - given.memory_bytes[device], 0)
    # A deadlocked step never allocates all of its memory, so its overflow must not count as small.
    score[0], score[1], score[2] = over if step_s < np.inf else np.inf, step_s, moved


@kernel
def evaluate(
    buffers: LoweringBuffers, state: EngineState, score: FloatArray, is_strict: bool
) -> None:
    """Simulate the placement in the buffers and write its score, spans and peaks."""
    given, tables, scratch = buffers
    lower_into(given, tables, scratch)
    _reset(state, tables.places, tables.runs, tables.routes.size_ptr)
    run(state, tables, given.mode[0], is_strict)
    tensors = tables.transfers.tensor
    _take_score(given, state.spans, state.memory.peak, tensors, scratch.num_found[1], score)


@kernel
def _exchange(changes: Changes, device: LongArray, priority: FloatArray, which: int) -> None:
    """Apply a change by swapping values with ``changes``; a second call reverts it."""
    for index in range(changes.ptr[which], changes.ptr[which + 1]):
        op, partner = changes.op[index], changes.partner[index]
        if partner >= 0:
            priority[op], priority[partner] = priority[partner], priority[op]
            continue
        device[op], changes.device[index] = changes.device[index], device[op]
        if not np.isnan(changes.priority[index]):
            priority[op], changes.priority[index] = changes.priority[index], priority[op]


@kernel
def _is_better(score: FloatArray, other: FloatArray, tolerance: float) -> bool:
    if score[0] != other[0]:
        return bool(score[0] < other[0])
    # A step that is shorter by a rounding error is no improvement.
    limit_s = other[1] * (tolerance - _NOISE)
    return bool(score[1] < limit_s or (score[1] <= other[1] and score[2] < other[2]))


@kernel
def _limit_s(present: FloatArray, tolerance: float) -> float:
    """Return the longest step time that can still be accepted.

    It is infinite if the current plan exceeds memory: fitting is better than any step time.
    """
    if present[0] > 0.0:
        return np.inf
    return float(present[1] * max(tolerance, 1.0) * (1.0 + _NOISE))


@kernel
def _remember(walk: ChangeWalk, score: FloatArray, device: LongArray, priority: FloatArray) -> None:
    for index in range(len(score)):
        walk.best[index] = score[index]
    for op in range(len(device)):
        walk.best_device[op] = device[op]
        walk.best_priority[op] = priority[op]


@kernel
def try_changes(
    buffers: LoweringBuffers,
    state: EngineState,
    changes: Changes,
    walk: ChangeWalk,
    score: FloatArray,
    is_strict: bool,
) -> int:
    """Try changes one by one and revert those that are not accepted.

    If ``walk.stops``, returns the number of the first accepted change, else -1 after trying all.
    """
    device, priority = buffers.tables.runs.device, buffers.tables.runs.priority
    for which in range(len(changes.ptr) - 1):
        _exchange(changes, device, priority, which)
        state.schedule.limit_s[0] = _limit_s(walk.present, changes.tolerance[which])
        evaluate(buffers, state, score, is_strict)
        if not _is_better(score, walk.present, changes.tolerance[which]):
            _exchange(changes, device, priority, which)
            continue
        if walk.stops[0]:
            return which
        for index in range(len(score)):
            walk.present[index] = score[index]
        if _is_better(score, walk.best, 1.0):
            _remember(walk, score, device, priority)
    return -1
