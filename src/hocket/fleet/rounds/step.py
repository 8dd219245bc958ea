"""``step(state, event)``: all decisions of a fleet, as one pure function.

The simulator feeds it a trace, the service what really happens. Same state and event, same answer;
the old state stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.errors import UsageError
from hocket.fleet.rounds import gavel, improved
from hocket.fleet.rounds.actions import (
    CANCELLED,
    DEVICE_LOST,
    FAILED,
    FINISHED,
    GIVEN_UP,
    NOTHING,
    PAUSED_BY_USER,
    Actions,
)
from hocket.fleet.rounds.assign import rows_of, set_rates
from hocket.fleet.rounds.events import (
    AddDevices,
    Cancel,
    Event,
    Fail,
    Finish,
    Pause,
    Progress,
    RemoveDevices,
    Resume,
    Submit,
    Tick,
)
from hocket.fleet.rounds.state import (
    ENDED,
    PAUSED,
    RUNNING,
    WAITING,
    Jobs,
    State,
    lay_out,
    new_jobs,
    with_devices,
)

Counts = NDArray[np.int64]

_LEARNING = 0.5
"""Weight of a new measurement of a throughput against all before."""


def step(state: State, event: Event) -> tuple[State, Actions]:
    """The state after an event, and what is to be done about it."""
    if event.time_s < state.time_s:
        raise UsageError(f"an event at {event.time_s} s comes after one at {state.time_s} s")
    state, jobs = _count(state, event.time_s)
    state, actions = _HANDLERS[type(event)](state, jobs, event)
    return state, actions


def _count(state: State, time_s: float) -> tuple[State, Jobs]:
    """The state at a later moment, and its rows to write to."""
    from hocket.fleet.rounds.kernel import count

    jobs = state.jobs.copied()
    plan = state.pair_plan
    none = np.zeros((0, 0, state.num_kinds))
    amount, credit_s = (none, none) if plan is None else (plan.amount, plan.credit_s.copy())
    count(jobs, time_s, state.rules.mechanism == "improved", credit_s, amount)
    if plan is not None:
        state = state.but(pair_plan=replace(plan, credit_s=credit_s))
    return state.but(time_s=time_s, jobs=jobs), jobs


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


def _tick(state: State, jobs: Jobs, event: Tick) -> tuple[State, Actions]:
    if state.time_s < state.next_tick_s:
        return state, NOTHING
    return _begin_round(state, jobs)


def _begin_round(state: State, jobs: Jobs) -> tuple[State, Actions]:
    ended = jobs.rows["phase"] == ENDED
    names = state.names
    if ended.any():
        names = dict(names)
        for number in jobs.rows["number"][ended].tolist():
            del names[number]
        jobs = jobs.taken(~ended)
    runs = jobs.rows["phase"] == RUNNING
    # A checkpoint per round: more than one round of work is never lost.
    jobs.rows["saved_steps"][runs] = jobs.rows["done_steps"][runs]
    state = state.but(
        jobs=jobs,
        names=names,
        round_number=state.round_number + 1,
        next_tick_s=state.time_s + state.rules.round_s if len(jobs.rows) else np.inf,
    )
    begin = gavel.begin_round if state.rules.mechanism == "gavel" else improved.begin_round
    return begin(state, jobs)


def _react(state: State, jobs: Jobs, before: Actions = NOTHING) -> tuple[State, Actions]:
    """Between rounds: begin one if none is due, else hand out what is free (not in Gavel's)."""
    if np.isinf(state.next_tick_s):
        state, after = _begin_round(state, jobs)
    elif state.rules.mechanism == "gavel":
        return state, before
    else:
        state, after = improved.refill(state, jobs)
    if not len(before.stopped):
        return state, after
    return state, replace(
        after,
        stopped=np.concatenate([before.stopped, after.stopped]),
        stopped_attempt=np.concatenate([before.stopped_attempt, after.stopped_attempt]),
        stopped_reason=np.concatenate([before.stopped_reason, after.stopped_reason]),
    )


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────


def _submit(state: State, jobs: Jobs, event: Submit) -> tuple[State, Actions]:
    last = int(jobs.rows["number"][-1]) if len(jobs.rows) else -1
    for job in event.jobs:
        if job.number <= last:
            raise UsageError(f"job {job.number} comes after job {last}: numbers must rise")
        if len(job.steps_per_s) != state.num_kinds or job.gang < 1 or not job.weight > 0.0:
            raise UsageError(f"job {job.number} does not fit the fleet")
        if state.pair_table is not None and not -1 <= job.profile < state.num_profiles:
            raise UsageError(f"job {job.number} names a profile that does not exist")
        last = job.number
    fresh = new_jobs(event.jobs, state.num_kinds, state.time_s)
    fresh.rows["profile"] %= state.num_profiles + 1
    if state.rules.mechanism == "gavel":
        fresh.received_s[:] = state.rules.round_s / 2.0
    jobs = jobs.joined(fresh)
    names = {**state.names, **{job.number: job.name for job in event.jobs}}
    state = state.but(jobs=jobs, names=names, is_dirty=True)
    return _react(state, jobs)


def _finish(state: State, jobs: Jobs, event: Finish) -> tuple[State, Actions]:
    at = _rows(state, event.numbers)
    jobs.rows["done_steps"][at] = jobs.rows["total_steps"][at]
    return _end(state, jobs, at, FINISHED)


def _cancel(state: State, jobs: Jobs, event: Cancel) -> tuple[State, Actions]:
    return _end(state, jobs, _rows(state, event.numbers), CANCELLED)


def _end(state: State, jobs: Jobs, at: Counts, reason: int) -> tuple[State, Actions]:
    state, actions = _stop(state, jobs, at, reason, ENDED)
    return _react(state.but(is_dirty=True), jobs, actions)


def _fail(state: State, jobs: Jobs, event: Fail) -> tuple[State, Actions]:
    at = _rows(state, (event.number,))
    if jobs.rows["attempt"][at[0]] != event.attempt or jobs.rows["phase"][at[0]] != RUNNING:
        return state, NOTHING
    saved = jobs.rows["saved_steps"][at] if event.done_steps is None else event.done_steps
    jobs.rows["done_steps"][at] = np.minimum(saved, jobs.rows["total_steps"][at])
    jobs.rows["failures"][at] += 1
    if jobs.rows["failures"][at[0]] >= state.rules.max_failures:
        return _end(state, jobs, at, GIVEN_UP)
    state, actions = _stop(state, jobs, at, FAILED, WAITING)
    return _react(state, jobs, actions)


def _pause(state: State, jobs: Jobs, event: Pause) -> tuple[State, Actions]:
    state, actions = _stop(state, jobs, _rows(state, event.numbers), PAUSED_BY_USER, PAUSED)
    return _react(state.but(is_dirty=True), jobs, actions)


def _resume(state: State, jobs: Jobs, event: Resume) -> tuple[State, Actions]:
    at = _rows(state, event.numbers)
    at = at[jobs.rows["phase"][at] == PAUSED]
    jobs.rows["phase"][at] = WAITING
    jobs.rows["waiting_since_s"][at] = state.time_s
    return _react(state.but(is_dirty=True), jobs)


def _progress(state: State, jobs: Jobs, event: Progress) -> tuple[State, Actions]:
    """Correct the work done, and the throughput where the job ran alone since it was counted."""
    at = int(_rows(state, (event.number,))[0])
    job = jobs.rows[at]
    if job["attempt"] != event.attempt or job["phase"] != RUNNING:
        return state, NOTHING
    worked_s = state.time_s - job["measured_s"]
    kind, steps = int(job["kind"]), event.done_steps - job["measured_steps"]
    if job["partner"] < 0 and worked_s > 0.0 and steps > 0.0:
        before = jobs.steps_per_s[at, kind]
        jobs.steps_per_s[at, kind] = before + _LEARNING * (steps / worked_s - before)
        set_rates(state, jobs, np.array([at]))
    jobs.rows["measured_s"][at] = max(state.time_s, job["ready_s"])
    jobs.rows["measured_steps"][at] = event.done_steps
    jobs.rows["done_steps"][at] = min(event.done_steps, job["total_steps"])
    return state.but(is_dirty=True), NOTHING


def _rows(state: State, numbers: tuple[int, ...]) -> Counts:
    return np.array([state.row_of(number) for number in numbers], dtype=np.int64)


def _stop(state: State, jobs: Jobs, at: Counts, reason: int, phase: int) -> tuple[State, Actions]:
    """Take the devices of jobs away; ``phase`` is what they are then."""
    running = at[jobs.rows["phase"][at] == RUNNING]
    numbers = jobs.rows["number"][running]
    _widow(state, jobs, running)
    jobs.rows["phase"][at] = phase
    jobs.rows["kind"][at] = jobs.rows["partner"][at] = -1
    jobs.rows["waiting_since_s"][at] = state.time_s
    holders = state.holders
    if len(numbers):
        holders = holders.copy()
        for number in numbers.tolist():
            holders[holders == number] = -1
        is_second = (holders[:, 0] < 0) & (holders[:, 1] >= 0)
        holders[is_second] = holders[is_second][:, ::-1]
    actions = replace(
        NOTHING,
        stopped=numbers,
        stopped_attempt=jobs.rows["attempt"][running],
        stopped_reason=np.full(len(running), reason),
    )
    return state.but(holders=holders), actions


def _widow(state: State, jobs: Jobs, running: Counts) -> None:
    """Jobs whose partner stops go on alone, at full speed."""
    partners = rows_of(jobs, jobs.rows["partner"][running])
    partners = partners[partners >= 0]
    if len(partners):
        jobs.rows["partner"][partners] = -1
        set_rates(state, jobs, partners)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def _add_devices(state: State, jobs: Jobs, event: AddDevices) -> tuple[State, Actions]:
    return _react(with_devices(state, event.devices), jobs)


def _remove_devices(state: State, jobs: Jobs, event: RemoveDevices) -> tuple[State, Actions]:
    gone = [index for index, name in enumerate(state.device_names) if name in event.names]
    is_up = state.is_up.copy()
    is_up[gone] = False
    layout = lay_out(state.device_kind, state.device_server, is_up, state.num_kinds)
    numbers = np.unique(state.holders[gone])
    at = rows_of(jobs, numbers[numbers >= 0])
    jobs.rows["done_steps"][at] = jobs.rows["saved_steps"][at]
    state, actions = _stop(state, jobs, at, DEVICE_LOST, WAITING)
    return _react(state.but(is_up=is_up, layout=layout, is_dirty=True), jobs, actions)


_HANDLERS: dict[type, Callable[[State, Jobs, Any], tuple[State, Actions]]] = {
    Submit: _submit,
    Finish: _finish,
    Cancel: _cancel,
    Fail: _fail,
    Pause: _pause,
    Resume: _resume,
    Progress: _progress,
    AddDevices: _add_devices,
    RemoveDevices: _remove_devices,
    Tick: _tick,
}
