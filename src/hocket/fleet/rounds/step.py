"""All decisions of a fleet as one pure function, ``step(state, event)``.

The simulator calls it with the events of a trace, the service with real ones. The same state and
event always give the same result, and the old state is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.base.errors import UsageError
from hocket.fleet.rounds import dependencies, gavel, improved
from hocket.fleet.rounds.actions import (
    CANCELLED,
    DEVICE_LOST,
    DRAINED,
    FAILED,
    FINISHED,
    GIVEN_UP,
    NOTHING,
    PAUSED_BY_USER,
    RESIZED,
    STOP_REASONS,
    TIMED_OUT,
    Actions,
    only_stops,
    with_stops,
)
from hocket.fleet.rounds.assign import rows_of, speeds_of
from hocket.fleet.rounds.events import (
    AddDevices,
    Cancel,
    Drain,
    Event,
    Fail,
    Finish,
    GangSize,
    Leave,
    Lose,
    Pause,
    Progress,
    RemoveDevices,
    Reopen,
    Resize,
    Resume,
    Submit,
    Tick,
    TimeOut,
)
from hocket.fleet.rounds.fairness import hand_on_credit, with_usage
from hocket.fleet.rounds.interference import forbid_pair, learn_alone, learn_together
from hocket.fleet.rounds.state import (
    BLOCKED,
    CONDITIONS,
    ENDED,
    PAUSED,
    RUNNING,
    WAITING,
    FleetState,
    Job,
    Jobs,
    empty_rows,
    is_usable,
    joined_rows,
    lay_out,
    some_rows,
    with_devices,
    write_new_jobs,
)

_LEARNING = 0.5
"""Weight of a new measurement of a throughput against all before."""


def step(state: FleetState, event: Event) -> tuple[FleetState, Actions]:
    """Apply an event: the next state, and the jobs to stop and to start."""
    if not state.time_s <= event.time_s < math.inf:
        raise UsageError(f"an event at {event.time_s} s comes after one at {state.time_s} s")
    state, jobs = _count(state, event)
    return _HANDLERS[type(event)](state, jobs, event)


def _count(state: FleetState, event: Event) -> tuple[FleetState, Jobs]:
    """The state at the time of the event, with writable rows, ended jobs removed at a round, and
    space for new jobs."""
    from hocket.fleet.rounds.kernels.count import count

    time_s = float(event.time_s)
    state = with_usage(state, time_s)
    rows, names = state.jobs.rows, state.names
    jobs = Jobs(*(column.copy() for column in state.jobs))
    if isinstance(event, Tick) and time_s >= state.next_tick_s and (rows["phase"] == ENDED).any():
        left = np.flatnonzero(rows["phase"] != ENDED)
        jobs = Jobs(some_rows(rows, left), *(column[left] for column in state.jobs[1:]))
        names = {number: names[number] for number in jobs.rows["number"].tolist()}
    plan, earns = state.pair_plan, state.rules.mechanism == "improved"
    credit_s = amount = speeds_of(state).beside
    if plan is not None:
        credit_s, amount = plan.credit_s.copy(), plan.amount
        state = state.but(pair_plan=replace(plan, credit_s=credit_s))
    count(jobs, time_s, earns, credit_s, amount)
    if isinstance(event, Submit):
        fresh = empty_rows(len(event.jobs), state.num_types)
        columns = (np.concatenate(both) for both in zip(jobs[1:], fresh[1:], strict=True))
        jobs = Jobs(joined_rows(jobs.rows, fresh.rows), *columns)
    return state.but(time_s=time_s, jobs=jobs, names=names), jobs


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


def _tick(state: FleetState, jobs: Jobs, event: Tick) -> tuple[FleetState, Actions]:
    if state.time_s < state.next_tick_s:
        return state, NOTHING
    # Since the drain, more jobs may have shown that they save their work.
    state, stops = _leave_drained(state, jobs)
    state, actions = _begin_round(state, jobs)
    return state, _joined(stops, actions)


def _begin_round(state: FleetState, jobs: Jobs) -> tuple[FleetState, Actions]:
    state = state.but(
        round_number=state.round_number + 1,
        next_tick_s=state.time_s + state.rules.round_s if len(jobs.rows) else np.inf,
    )
    begin = gavel.begin_round if state.rules.mechanism == "gavel" else improved.begin_round
    return begin(state, jobs)


def _react(state: FleetState, jobs: Jobs, before: Actions = NOTHING) -> tuple[FleetState, Actions]:
    """After an event: begin a round if none is scheduled, else hand out free devices (not in
    Gavel's rounds)."""
    if math.isinf(state.next_tick_s):
        state, after = _begin_round(state, jobs)
    elif state.rules.mechanism == "gavel":
        return state, before
    else:
        state, after = improved.refill(state, jobs)
    return state, _joined(before, after)


def _joined(before: Actions, after: Actions) -> Actions:
    return with_stops(after, before) if len(before.stopped) else after


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────


def _submit(state: FleetState, jobs: Jobs, event: Submit) -> tuple[FleetState, Actions]:
    first = len(jobs.rows) - len(event.jobs)
    last = int(jobs.rows["number"][first - 1]) if first else -1
    known = set(jobs.rows["number"][:first][jobs.rows["phase"][:first] != ENDED].tolist())
    known |= event.living
    for job in event.jobs:
        known.add(job.number)
        if not all(needed in known and needed != job.number for needed, _ in job.after):
            raise UsageError(f"job {job.number} depends on a job that does not exist")
        if job.number <= last:
            raise UsageError(f"job number {job.number} is not larger than {last}, the last one")
        if not _fits(state, job):
            raise UsageError(f"job {job.number} does not fit the fleet")
        if state.pair_table is not None and not -1 <= job.profile < state.num_profiles:
            raise UsageError(f"job {job.number} names a profile that does not exist")
        last = job.number
    write_new_jobs(jobs, first, event.jobs, state.time_s)
    # A profile of -1 becomes the last row, whose jobs share with nobody.
    jobs.rows["profile"][first:] %= state.num_profiles + 1
    # As in Gavel's code, to avoid division by zero in priorities.
    if state.rules.mechanism == "gavel":
        jobs.received_s[first:] = state.rules.round_s / 2.0
    names = state.names.copy()
    names.update((job.number, job.name) for job in event.jobs)
    state = dependencies.with_new(state, event.jobs)
    return _react(state.but(names=names, is_dirty=True), jobs)


def _fits(state: FleetState, job: Job) -> bool:
    """True if a job states a speed for every device type and all its numbers are valid."""
    speeds, num_types = job.steps_per_s, len(state.device_types)
    if job.spread_steps_per_s:
        speeds, num_types = speeds + job.spread_steps_per_s, 2 * num_types
    return (
        len(job.steps_per_s) == len(state.device_types)
        and len(speeds) == num_types
        and all(0.0 <= speed < math.inf for speed in speeds)
        and job.gang >= 1
        and 0.0 < job.weight < math.inf
        and job.total_steps > 0.0
        and not math.isnan(job.deadline_s)
        and 0 <= job.team < len(state.teams)
        and 0 <= job.user < len(state.users)
        and job.time_limit_s > 0.0
        and job.max_failures >= 0
        and all(condition in CONDITIONS for _, condition in job.after)
    )


def _finish(state: FleetState, jobs: Jobs, event: Finish) -> tuple[FleetState, Actions]:
    at = _rows(state, event.numbers)
    jobs.rows["done_steps"][at] = jobs.rows["total_steps"][at]
    return _end(state, jobs, at, FINISHED, event.living)


def _cancel(state: FleetState, jobs: Jobs, event: Cancel) -> tuple[FleetState, Actions]:
    reason = GIVEN_UP if event.is_failure else CANCELLED
    return _end(state, jobs, _rows(state, event.numbers), reason, event.living)


def _time_out(state: FleetState, jobs: Jobs, event: TimeOut) -> tuple[FleetState, Actions]:
    return _end(state, jobs, _rows(state, event.numbers), TIMED_OUT, event.living)


def _end(
    state: FleetState, jobs: Jobs, at: LongArray, reason: int, living: frozenset[int]
) -> tuple[FleetState, Actions]:
    state, actions = _stop(state, jobs, at, reason, ENDED)
    hand_on_credit(state, jobs, at)
    # Processes that still run may write what the next jobs read.
    gone = [number for number in jobs.rows["number"][at].tolist() if number not in living]
    state, actions = dependencies.resolve_dependencies(state, jobs, gone, reason, actions)
    return _react(state.but(is_dirty=True), jobs, actions)


def _leave(state: FleetState, jobs: Jobs, event: Leave) -> tuple[FleetState, Actions]:
    reason = STOP_REASONS.index(event.reason)
    state, actions = dependencies.resolve_dependencies(state, jobs, [event.number], reason, NOTHING)
    return _react(state.but(is_dirty=True), jobs, actions)


def _fail(state: FleetState, jobs: Jobs, event: Fail) -> tuple[FleetState, Actions]:
    at = _rows(state, (event.number,))
    if jobs.rows["attempt"][at[0]] != event.attempt or jobs.rows["phase"][at[0]] != RUNNING:
        return state, NOTHING
    _refuse_wrong_steps(event.done_steps)
    saved = jobs.rows["saved_steps"][at] if event.done_steps is None else event.done_steps
    saved = np.minimum(saved, jobs.rows["total_steps"][at])
    jobs.rows["done_steps"][at] = jobs.rows["saved_steps"][at] = saved
    jobs.rows["failures"][at] += 1
    if (partner := int(jobs.rows["partner"][at[0]])) >= 0:
        # Whichever of the two exceeded the memory, they do not fit together.
        state = forbid_pair(state, jobs, int(at[0]), state.row_of(partner))
    max_failures = int(jobs.rows["max_failures"][at[0]]) or state.rules.max_failures
    # A job may set its own limit; 0 stands for that of the rules.
    if jobs.rows["failures"][at[0]] >= max_failures:
        return _end(state, jobs, at, GIVEN_UP, event.living)
    state, actions = _stop(state, jobs, at, FAILED, WAITING)
    return _react(state, jobs, actions)


def _lose(state: FleetState, jobs: Jobs, event: Lose) -> tuple[FleetState, Actions]:
    """Set back a job whose stopped attempt saved less than was counted; it gets longer turns.

    What the present attempt has done since stays.
    """
    _refuse_wrong_steps(event.saved_steps)
    at = int(_rows(state, (event.number,))[0])
    job = jobs.rows[at]
    steps_at_start = job["measured_steps"] if job["phase"] == RUNNING else job["done_steps"]
    lost = max(float(steps_at_start) - event.saved_steps, 0.0)
    jobs.rows["losses"][at] += 1
    for name in ("done_steps", "measured_steps"):
        jobs.rows[name][at] = max(job[name] - lost, 0.0)
    jobs.rows["saved_steps"][at] = min(job["saved_steps"], event.saved_steps, job["done_steps"])
    return state, NOTHING


def _pause(state: FleetState, jobs: Jobs, event: Pause) -> tuple[FleetState, Actions]:
    at = _rows(state, event.numbers)
    # Jobs that save their work do so when they are asked to stop; others lose it.
    rows, saves = jobs.rows, at[_saves(jobs, at)]
    rows["saved_steps"][saves] = rows["done_steps"][saves]
    rows["done_steps"][at] = rows["saved_steps"][at]
    state, actions = _stop(state, jobs, at, PAUSED_BY_USER, PAUSED)
    return _react(state.but(is_dirty=True), jobs, actions)


def _resize(state: FleetState, jobs: Jobs, event: Resize) -> tuple[FleetState, Actions]:
    """Change gang sizes: running jobs are stopped and wait with the new size; a job that would lose
    work keeps its size."""
    rows, stopped = jobs.rows, []
    for size in event.sizes:
        at = int(_rows(state, (size.number,))[0])
        if not _is_size(state, size):
            raise UsageError(f"job {size.number} does not fit the fleet with {size.gang} devices")
        is_running = rows["phase"][at] == RUNNING
        if is_running and not _saves(jobs, np.array([at]))[0]:
            continue
        if is_running:
            rows["saved_steps"][at] = rows["done_steps"][at]
            stopped.append(at)
        rows["gang"][at] = size.gang
        jobs.steps_per_s[at] = jobs.spread_steps_per_s[at] = size.steps_per_s
    which = np.array(stopped, dtype=np.int64)
    state, actions = _stop(state, jobs, which, RESIZED, WAITING)
    return _react(state.but(is_dirty=True), jobs, actions)


def _is_size(state: FleetState, size: GangSize) -> bool:
    speeds = size.steps_per_s
    is_known = len(speeds) == len(state.device_types) and all(0.0 <= s < math.inf for s in speeds)
    return is_known and size.gang >= 1


def _saves(jobs: Jobs, at: LongArray) -> BoolArray:
    return np.asarray((jobs.rows["preemptible"][at] > 0) & (jobs.rows["losses"][at] == 0))


def _resume(state: FleetState, jobs: Jobs, event: Resume) -> tuple[FleetState, Actions]:
    at = _rows(state, event.numbers)
    at = at[jobs.rows["phase"][at] == PAUSED]
    is_blocked = np.isin(jobs.rows["number"][at], state.dependencies[:, 0])
    jobs.rows["phase"][at] = np.where(is_blocked, BLOCKED, WAITING)
    jobs.rows["waiting_since_s"][at] = state.time_s
    return _react(state.but(is_dirty=True), jobs)


def _progress(state: FleetState, jobs: Jobs, event: Progress) -> tuple[FleetState, Actions]:
    at = int(_rows(state, (event.number,))[0])
    job = jobs.rows[at]
    if job["attempt"] != event.attempt or job["phase"] != RUNNING:
        return state, NOTHING
    _refuse_wrong_steps(event.done_steps, event.saved_steps)
    if event.done_steps is not None:
        state = _measure(state, jobs, at, event.done_steps, replaces=event.replaces_guess)
    if event.saved_steps is not None:
        jobs.rows["saved_steps"][at] = min(event.saved_steps, job["total_steps"])
    return state, NOTHING


def _refuse_wrong_steps(*counts: float | None) -> None:
    for count in counts:
        if count is not None and not 0.0 <= count < math.inf:
            raise UsageError(f"{count!r} is no number of steps")


def _measure(
    state: FleetState, jobs: Jobs, at: int, done_steps: float, *, replaces: bool
) -> FleetState:
    """Correct steps done, and the throughput (alone or beside the partner) since the last
    report."""
    from hocket.fleet.rounds.kernels.rates import renew_rate

    job = jobs.rows[at]
    worked_s = state.time_s - job["measured_s"]
    steps = done_steps - job["measured_steps"]
    if worked_s > 0.0 and steps > 0.0 and job["partner"] >= 0:
        partner = state.row_of(int(job["partner"]))
        state = learn_together(state, jobs, at, partner, steps / worked_s)
        renew_rate(jobs, at, speeds_of(state))
    elif worked_s > 0.0 and steps > 0.0:
        _learn(state, jobs, at, steps / worked_s, weight=1.0 if replaces else _LEARNING)
        state = learn_alone(state.but(is_dirty=True), jobs, at)
    # The next measurement starts after the start-up of the job.
    jobs.rows["measured_s"][at] = max(state.time_s, job["ready_s"])
    jobs.rows["measured_steps"][at] = done_steps
    jobs.rows["done_steps"][at] = min(done_steps, job["total_steps"])
    return state


def _learn(
    state: FleetState, jobs: Jobs, at: int, measured_steps_per_s: float, *, weight: float
) -> None:
    from hocket.fleet.rounds.kernels.rates import renew_rate

    device_type = int(jobs.rows["device_type"][at])
    known = jobs.spread_steps_per_s if jobs.rows["is_spread"][at] else jobs.steps_per_s
    known[at, device_type] += weight * (measured_steps_per_s - known[at, device_type])
    renew_rate(jobs, at, speeds_of(state))


def _rows(state: FleetState, numbers: tuple[int, ...]) -> LongArray:
    return np.array([state.row_of(number) for number in dict.fromkeys(numbers)], dtype=np.int64)


def _stop(
    state: FleetState, jobs: Jobs, at: LongArray, reason: int, phase: int
) -> tuple[FleetState, Actions]:
    """Take the devices of jobs away and set their phase."""
    from hocket.fleet.rounds.kernels.release import take_away

    running = at[jobs.rows["phase"][at] == RUNNING]
    holders = state.holders.copy() if len(running) else state.holders
    rows = jobs.rows
    actions = only_stops(rows["number"][running], rows["attempt"][running], reason)
    take_away(jobs, at, phase, state.time_s, speeds_of(state), holders)
    return state.but(holders=holders), actions


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def _add_devices(state: FleetState, jobs: Jobs, event: AddDevices) -> tuple[FleetState, Actions]:
    return _react(with_devices(state, event.devices), jobs)


def _remove_devices(
    state: FleetState, jobs: Jobs, event: RemoveDevices
) -> tuple[FleetState, Actions]:
    gone = [index for index, name in enumerate(state.device_names) if name in event.names]
    is_up = state.is_up.copy()
    is_up[gone] = False
    numbers = np.unique(state.holders[gone])
    at = rows_of(jobs, numbers[numbers >= 0])
    jobs.rows["done_steps"][at] = jobs.rows["saved_steps"][at]
    state, actions = _stop(state, jobs, at, DEVICE_LOST, WAITING)
    return _react(_laid_out(state.but(is_up=is_up)), jobs, actions)


def _laid_out(state: FleetState) -> FleetState:
    usable = is_usable(state)
    layout = lay_out(state.type_of_device, state.device_server, usable, state.num_types)
    return state.but(layout=layout, is_dirty=True)


def _drain(state: FleetState, jobs: Jobs, event: Drain) -> tuple[FleetState, Actions]:
    state = state.but(drained=tuple(dict.fromkeys((*state.drained, *event.names))))
    state, actions = _leave_drained(_laid_out(state), jobs)
    return _react(state, jobs, actions)


def _leave_drained(state: FleetState, jobs: Jobs) -> tuple[FleetState, Actions]:
    """Stop jobs on drained devices if they save their work; others stay there until they end."""
    numbers = np.unique(state.holders[state.is_up & ~is_usable(state)])
    at = rows_of(jobs, numbers[numbers >= 0])
    # Others would lose their work, so they stay until they end.
    at = at[_saves(jobs, at)]
    jobs.rows["saved_steps"][at] = jobs.rows["done_steps"][at]
    return _stop(state, jobs, at, DRAINED, WAITING)


def _reopen(state: FleetState, jobs: Jobs, event: Reopen) -> tuple[FleetState, Actions]:
    drained = tuple(name for name in state.drained if name not in event.names)
    return _react(_laid_out(state.but(drained=drained)), jobs)


# How each type of event is handled.
_HANDLERS: dict[type, Callable[[FleetState, Jobs, Any], tuple[FleetState, Actions]]] = {
    Submit: _submit,
    Finish: _finish,
    Cancel: _cancel,
    TimeOut: _time_out,
    Leave: _leave,
    Drain: _drain,
    Reopen: _reopen,
    Fail: _fail,
    Lose: _lose,
    Pause: _pause,
    Resume: _resume,
    Progress: _progress,
    Resize: _resize,
    AddDevices: _add_devices,
    RemoveDevices: _remove_devices,
    Tick: _tick,
}
