"""Jobs that wait for other jobs, and limits of time: who may start now, and who never will.

A job that comes after others is blocked until each of them has ended as it must: ``ok`` (it
finished), ``failed`` (it was given up or timed out) or ``any``. Where one ends otherwise, the job
ends too, without having run, and so do those that come after it. A job counts as ended when its
processes are gone.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.rounds.actions import (
    DEPENDENCY,
    FINISHED,
    GIVEN_UP,
    TIMED_OUT,
    Actions,
    only_stops,
    with_stops,
)
from hocket.fleet.rounds.state import (
    BLOCKED,
    CONDITIONS,
    ENDED,
    RUNNING,
    WAITING,
    FleetState,
    Job,
    Jobs,
)


def is_satisfied(condition: str, reason: int) -> bool:
    """True if a job that ended for this reason lets the jobs that wait for it start."""
    if condition == "any":
        return True
    return reason == FINISHED if condition == "ok" else reason in (GIVEN_UP, TIMED_OUT)


def with_new(state: FleetState, fresh: tuple[Job, ...]) -> FleetState:
    """Add the dependencies of newly submitted jobs."""
    edges = [
        (job.number, needed, CONDITIONS.index(condition))
        for job in fresh
        for needed, condition in job.after
    ]
    if not edges:
        return state
    return state.but(dependencies=np.append(state.dependencies, np.array(edges), axis=0))


def resolve_dependencies(
    state: FleetState, jobs: Jobs, ended: list[int], reason: int, before: Actions
) -> tuple[FleetState, Actions]:
    """Unblock or end the jobs that waited for the jobs with the numbers ``ended``; ``jobs`` are
    changed in place.

    Jobs that end because a dependency failed are listed as stopped, even if they never ran.
    """
    edges = state.dependencies
    if not len(edges):
        return state, before
    rows = jobs.rows
    failed: list[LongArray] = []
    numbers = np.array(ended, dtype=np.int64)
    while len(numbers):
        # The jobs have ended, so what they waited for does not matter any more.
        edges = edges[~np.isin(edges[:, 0], numbers)]
        is_over = np.isin(edges[:, 1], numbers)
        breaks = np.array([not is_satisfied(condition, reason) for condition in CONDITIONS])
        numbers = np.unique(edges[is_over & breaks[edges[:, 2]], 0])
        edges, reason = edges[~is_over], DEPENDENCY
        failed.append(numbers)
    at = np.searchsorted(rows["number"], np.concatenate([*failed, numbers]))
    rows["phase"][at] = ENDED
    free = (rows["phase"] == BLOCKED) & ~np.isin(rows["number"], edges[:, 0])
    rows["phase"][free] = WAITING
    rows["waiting_since_s"][free] = state.time_s
    if not len(at):
        return state.but(dependencies=edges), before
    skipped = only_stops(rows["number"][at], rows["attempt"][at], DEPENDENCY)
    return state.but(dependencies=edges), with_stops(skipped, before)


# ── limits of time ───────────────────────────────────────────────────────────────────────────────


def next_limit_s(state: FleetState) -> float:
    """Moment at which the first running job reaches its time limit; infinite if none has one."""
    return float(_limits(state)[1].min(initial=np.inf))


def over_limit(state: FleetState, time_s: float) -> tuple[int, ...]:
    """Numbers of the running jobs that have reached their time limits."""
    numbers, limit_s = _limits(state)
    return tuple(numbers[limit_s <= time_s].tolist())


def _limits(state: FleetState) -> tuple[LongArray, FloatArray]:
    """Numbers of the running jobs, and the moment at which each reaches its time limit."""
    rows = state.jobs.rows
    running = rows[rows["phase"] == RUNNING]
    left_s = running["time_limit_s"] - running["held_s"]
    return running["number"], running["counted_s"] + left_s
