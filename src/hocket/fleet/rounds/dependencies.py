"""Jobs that wait for other jobs, and limits of time: who may start now, and who never will.

A job that comes after others is blocked until each of them has ended as it must: ``ok`` (it
finished), ``failed`` (it was given up or timed out) or ``any``. Where one ends otherwise, the job
ends too, without having run, and so do those that come after it.
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


def settle(
    state: FleetState, jobs: Jobs, ended: LongArray, reason: int, before: Actions
) -> tuple[FleetState, Actions]:
    """Unblock or end the jobs that waited for jobs that have just ended; ``jobs`` are changed in
    place.

    Jobs that end because a dependency failed are listed as stopped, even if they never ran.
    """
    edges = state.dependencies.tolist()
    if not edges:
        return state, before
    ends = [(int(number), reason) for number in jobs.rows["number"][ended]]
    failed: list[int] = []
    while ends:
        number, why = ends.pop()
        # The job has ended, so what it waited for does not matter any more.
        edges = [edge for edge in edges if edge[0] != number]
        for job, needed, condition in [edge for edge in edges if edge[1] == number]:
            edges.remove([job, needed, condition])
            if not is_satisfied(CONDITIONS[condition], why) and job not in failed:
                failed.append(job)
                ends.append((job, DEPENDENCY))
    rows = jobs.rows
    at = np.searchsorted(rows["number"], np.array(failed, dtype=np.int64))
    rows["phase"][at] = ENDED
    free = (rows["phase"] == BLOCKED) & ~np.isin(rows["number"], [edge[0] for edge in edges])
    rows["phase"][free] = WAITING
    rows["waiting_since_s"][free] = state.time_s
    rest = np.array(edges, dtype=np.int64).reshape(-1, 3)
    if not len(at):
        return state.but(dependencies=rest), before
    skipped = only_stops(rows["number"][at], rows["attempt"][at], DEPENDENCY)
    return state.but(dependencies=rest), with_stops(skipped, before)


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
