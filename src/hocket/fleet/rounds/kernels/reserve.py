"""Devices reserved for jobs that cannot start yet, and what others may have of them before.

Applies rules 3 to 5 of `hocket.fleet.rounds.rules`. O(reserved jobs x kinds x steps in time).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.kernels.rates import speed_on
from hocket.fleet.rounds.kernels.timeline import (
    Timeline,
    add,
    after_now_s,
    begin,
    close,
    earliest_s,
)
from hocket.fleet.rounds.rules import ends_in_s, is_bound, is_overdue
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Floor, Pace, RoundChoice, Wishes
from hocket.kernels import kernel

_WAITING = 0
_MAX_IN_LINE = 1000
"""Jobs for which a start is foreseen; those behind wait."""


@kernel
def foresee(
    time_s: float,
    jobs: Jobs,
    pace: Pace,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    timeline: Timeline,
) -> None:
    """Free devices by time, as kept jobs give theirs back; only where somebody is reserved."""
    num_kinds = choice.free.shape[0]
    timeline.size[num_kinds] = 0
    is_used = pace.backfills
    # Where all jobs can be stopped, a reserved one need not wait for others to end.
    for i in range(jobs.rows.shape[0] if pace.reserve_after_s < np.inf else 0):
        is_used = is_used or wishes.is_reserved[i]
    if pace.by_share or not is_used:
        return
    timeline.size[num_kinds] = 1
    for kind in range(num_kinds):
        begin(timeline, kind, time_s, choice.free[kind])
    for server in range(floor.server_kind.shape[0]):
        for at in range(floor.server_ptr[server], floor.server_ptr[server + 1]):
            row = floor.holders[floor.order[at], 0]
            if row >= 0 and choice.kind[row] >= 0:
                free_s = _free_s(time_s, jobs, floor.order[at], pace, floor, choice)
                add(timeline, floor.server_kind[server], 1, free_s, np.inf)


@kernel
def given_back_s(time_s: float, jobs: Jobs, i: int, pace: Pace) -> float:
    """When a kept job gives its devices back, at the latest; infinite where that is not known."""
    rows = jobs.rows
    left_s = _needed_s(jobs, i, rows.rate[i], pace)
    left_s += max(rows.ready_s[i] - time_s, 0.0) - pace.restart_s
    # A moment later than now: it has not ended yet, though it should have.
    end_s = time_s + max(left_s, 1e-3 * pace.round_s)
    if is_bound(rows.preemptible[i]) or pace.keeps_line:
        return float(end_s)
    return float(min(end_s, max(pace.next_round_s, rows.started_s[i] + pace.min_run_s)))


@kernel
def _needed_s(jobs: Jobs, i: int, speed: float, pace: Pace) -> float:
    rows, slowest = jobs.rows, np.inf
    for kind in range(jobs.steps_per_s.shape[1]):
        if jobs.steps_per_s[i, kind] > 0.0:
            slowest = min(slowest, jobs.steps_per_s[i, kind])
    restarts_s = rows.attempt[i] * pace.restart_s
    overdue = is_overdue(rows.held_s[i], restarts_s, rows.total_steps[i] / slowest, pace.round_s)
    left = max(rows.total_steps[i] - rows.done_steps[i], 0.0)
    return ends_in_s(left, speed, rows.time_limit_s[i] - rows.held_s[i], pace.restart_s, overdue)


@kernel
def may_backfill(
    time_s: float,
    jobs: Jobs,
    i: int,
    kind: int,
    pace: Pace,
    largest_server: LongArray,
    choice: RoundChoice,
    timeline: Timeline,
) -> bool:
    """True if a job that starts now delays no reserved one; it is then counted."""
    if not is_bound(jobs.rows.preemptible[i]):
        return True
    gang, needed_s = (
        jobs.rows.gang[i],
        _needed_s(jobs, i, speed_on(jobs, i, kind, largest_server), pace),
    )
    if earliest_s(timeline, kind, gang, needed_s) > time_s:
        return False
    add(timeline, kind, -gang, time_s, time_s + needed_s)
    choice.ends_s[i] = time_s + needed_s
    return True


@kernel
def start_or_reserve(
    time_s: float,
    jobs: Jobs,
    i: int,
    wanted: int,
    pace: Pace,
    largest_server: LongArray,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    timeline: Timeline,
) -> None:
    """Grant a reserved job devices now, on the kind that it wants or where it is fastest, else
    reserve them where it ends first."""
    num_kinds, gang = choice.free.shape[0], jobs.rows.gang[i]
    best, best_speed, later, later_s, later_end_s = -1, 0.0, -1, np.inf, np.inf
    for kind in range(num_kinds):
        speed = speed_on(jobs, i, kind, largest_server)
        if speed <= 0.0:
            continue
        needed_s = _needed_s(jobs, i, speed, pace)
        start_s = earliest_s(timeline, kind, gang, needed_s)
        if start_s <= time_s and gang <= choice.free[kind]:
            if not wishes.is_withdrawn[i * num_kinds + kind]:
                if kind == wanted or (speed > best_speed and (best < 0 or best != wanted)):
                    best, best_speed = kind, speed
                continue
            start_s = after_now_s(timeline, kind)
        end_s = start_s + needed_s
        is_sooner = end_s < later_end_s or (end_s == later_end_s and start_s < later_s)
        if later < 0 or is_sooner:
            later, later_s, later_end_s = kind, start_s, end_s
    if best >= 0 and time_s + _needed_s(jobs, i, best_speed, pace) <= later_end_s:
        needed_s = _needed_s(jobs, i, best_speed, pace)
        choice.kind[i] = best
        choice.free[best] -= gang
        stops_s = time_s + needed_s
        if not is_bound(jobs.rows.preemptible[i]) and not pace.keeps_line:
            stops_s = min(stops_s, time_s + pace.round_s)
        add(timeline, best, -gang, time_s, stops_s)
    elif later >= 0:
        _reserve(time_s, jobs, i, later, later_s, later_end_s, pace, floor, choice, timeline)


@kernel
def _reserve(
    time_s: float,
    jobs: Jobs,
    i: int,
    kind: int,
    start_s: float,
    end_s: float,
    pace: Pace,
    floor: Floor,
    choice: RoundChoice,
    timeline: Timeline,
) -> None:
    gang = jobs.rows.gang[i]
    if gang > 1 and jobs.spread_steps_per_s[i, kind] <= 0.0:
        server, free_s = _first_free_server(time_s, jobs, kind, gang, pace, floor, choice)
        if server >= 0:
            floor.closed_s[server] = free_s
            end_s += max(free_s - start_s, 0.0) if start_s < np.inf else 0.0
            start_s = max(start_s, free_s)
    jobs.rows.reserved_s[i] = start_s
    if start_s < np.inf:
        add(timeline, kind, -gang, start_s, end_s)
    else:
        # Nobody knows when enough will be free: what becomes free is not given away for good.
        close(timeline, kind)


@kernel
def _first_free_server(
    time_s: float,
    jobs: Jobs,
    kind: int,
    gang: int,
    pace: Pace,
    floor: Floor,
    choice: RoundChoice,
) -> tuple[int, float]:
    """The server that has room for a gang first, of those that nobody is reserved, and when."""
    best, best_s = -1, np.inf
    for server in range(floor.server_kind.shape[0]):
        first, stop = floor.server_ptr[server], floor.server_ptr[server + 1]
        is_open = floor.closed_s[server] == np.inf
        if floor.server_kind[server] != kind or stop - first < gang or not is_open:
            continue
        # The gang-th earliest of its devices, found by counting those that are no later.
        for at in range(first, stop):
            free_s = _free_s(time_s, jobs, floor.order[at], pace, floor, choice)
            num_earlier = 0
            for other in range(first, stop):
                if _free_s(time_s, jobs, floor.order[other], pace, floor, choice) <= free_s:
                    num_earlier += 1
            if num_earlier >= gang and (best < 0 or free_s < best_s):
                best, best_s = server, free_s
    return best, best_s


@kernel
def _free_s(
    time_s: float, jobs: Jobs, device: int, pace: Pace, floor: Floor, choice: RoundChoice
) -> float:
    row = floor.holders[device, 0]
    if row < 0 or choice.kind[row] < 0:
        return time_s
    free_s = given_back_s(time_s, jobs, row, pace)
    other = floor.holders[device, 1]
    return max(free_s, given_back_s(time_s, jobs, other, pace)) if other >= 0 else free_s


@kernel
def fill_in_line(
    time_s: float,
    jobs: Jobs,
    pace: Pace,
    largest_server: LongArray,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    timeline: Timeline,
) -> None:
    """First come, first served with conservative backfill: in order of priority and arrival, each
    job starts or gets the earliest time that delays nobody before it."""
    in_line, level = 0, _next_level(jobs, np.inf)
    while level > -np.inf:
        for i in range(jobs.rows.shape[0]):
            is_waiting = jobs.rows.phase[i] == _WAITING and jobs.rows.over_quota[i] == 0
            if not is_waiting or jobs.rows.priority[i] != level or in_line >= _MAX_IN_LINE:
                continue
            in_line += 1
            start_or_reserve(
                time_s, jobs, i, -1, pace, largest_server, wishes, choice, floor, timeline
            )
            if choice.kind[i] >= 0:
                speed = speed_on(jobs, i, choice.kind[i], largest_server)
                choice.ends_s[i] = time_s + _needed_s(jobs, i, speed, pace)
        level = _next_level(jobs, level)


@kernel
def _next_level(jobs: Jobs, below: float) -> float:
    """The highest priority of waiting jobs below a level; minus infinity for none."""
    level = -np.inf
    for i in range(jobs.rows.shape[0]):
        if jobs.rows.phase[i] == _WAITING and level < jobs.rows.priority[i] < below:
            level = float(jobs.rows.priority[i])
    return level
