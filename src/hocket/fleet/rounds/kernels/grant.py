"""Walk wishes in order and grant what fits; reserve devices for jobs that cannot start yet.

Applies rules 3 to 5 of `hocket.fleet.rounds.rules`. The free devices of each type are kept as
a timeline of segments, with what is reserved of them: O(segments) for every question and change.
O(wishes + pairs x jobs that share + reserved jobs x types x segments).
"""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds.kernels.rates import speed_on
from hocket.fleet.rounds.kernels.wishes import sort_part
from hocket.fleet.rounds.rules import ends_in_s, is_overdue, runs_to_end
from hocket.fleet.rounds.state import WAITING
from hocket.fleet.rounds.tables import Round
from hocket.kernels import kernel

_MAX_IN_LINE = 1000
"""Jobs for which a start is predicted; those behind wait."""


# ── free devices by time ─────────────────────────────────────────────────────────────────────────


@kernel
def begin(r: Round, device_type: int, num_free: int) -> None:
    """Start the timeline of free devices of a type with those that are free now."""
    r.num_segments[device_type] = 1
    r.segment_s[device_type, 0] = r.time_s
    r.segment_free[device_type, 0] = num_free


@kernel
def segment_at(r: Round, device_type: int, time_s: float) -> int:
    """Index of the segment that begins at a moment, inserted if missing; the moment is not in the
    past."""
    size: int = r.num_segments[device_type]
    at = size
    while at > 0 and r.segment_s[device_type, at - 1] >= time_s:
        at -= 1
    if at < size and r.segment_s[device_type, at] == time_s:
        return at
    for later in range(size, at, -1):
        r.segment_s[device_type, later] = r.segment_s[device_type, later - 1]
        r.segment_free[device_type, later] = r.segment_free[device_type, later - 1]
    r.segment_s[device_type, at] = time_s
    r.segment_free[device_type, at] = r.segment_free[device_type, at - 1]
    r.num_segments[device_type] = size + 1
    return at


@kernel
def add(r: Round, device_type: int, count: int, start_s: float, end_s: float) -> None:
    """Add ``count`` free devices between two moments; a negative count reserves them."""
    # A reservation without a start reserves nothing.
    if start_s == np.inf or end_s <= start_s:
        return
    first = segment_at(r, device_type, start_s)
    last = r.num_segments[device_type] if end_s == np.inf else segment_at(r, device_type, end_s)
    for at in range(first, last):
        r.segment_free[device_type, at] += count


@kernel
def earliest_s(r: Round, device_type: int, count: int, duration_s: float) -> float:
    """The first moment from which ``count`` devices are free for ``duration_s``; infinite for
    never."""
    start_s, size = np.inf, r.num_segments[device_type]
    for at in range(size):
        if start_s < np.inf and r.segment_s[device_type, at] >= start_s + duration_s:
            return start_s
        if r.segment_free[device_type, at] < count:
            start_s = np.inf
        elif start_s == np.inf:
            start_s = r.segment_s[device_type, at]
    return start_s


@kernel
def after_now_s(r: Round, device_type: int) -> float:
    """The first moment at which more devices are free than now; infinite for never."""
    for at in range(1, r.num_segments[device_type]):
        if r.segment_free[device_type, at] > r.segment_free[device_type, 0]:
            return float(r.segment_s[device_type, at])
    return np.inf


@kernel
def block_type(r: Round, device_type: int) -> None:
    """Mark no device as free at any time: nobody knows when enough will be."""
    for at in range(r.num_segments[device_type]):
        r.segment_free[device_type, at] = 0.0


# ── reservations ─────────────────────────────────────────────────────────────────────────────────


@kernel
def predict_free_devices(r: Round) -> None:
    """Predict free devices over time, as kept jobs release theirs; only if a job is reserved."""
    rows = r.jobs.rows
    num_types = r.free.shape[0]
    r.has_timeline[0] = False
    is_used = r.parameters.backfills
    # If all jobs can be stopped, a reserved job need not wait for others to end.
    for i in range(rows.shape[0] if r.parameters.reserve_after_s < np.inf else 0):
        is_used = is_used or r.goes_first[i]
    if r.parameters.by_share or not is_used:
        return
    r.has_timeline[0] = True
    for device_type in range(num_types):
        begin(r, device_type, r.free[device_type])
    for server in range(r.layout.server_type.shape[0]):
        for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
            row = r.holders[r.layout.order[at], 0]
            if row >= 0 and r.device_type[row] >= 0:
                free_s = _free_s(r, r.layout.order[at])
                add(r, r.layout.server_type[server], 1, free_s, np.inf)


@kernel
def given_back_s(r: Round, i: int) -> float:
    """Latest moment at which a running job gives its devices back; infinite if unknown."""
    rows = r.jobs.rows
    left_s = _needed_s(r, i, rows.rate[i])
    left_s += max(rows.ready_s[i] - r.time_s, 0.0) - r.parameters.restart_s
    # At least a moment after now: the job should have ended but has not.
    end_s = r.time_s + max(left_s, 1e-3 * r.parameters.round_s)
    if runs_to_end(rows.preemptible[i]) or r.parameters.runs_in_arrival_order:
        return float(end_s)
    return float(min(end_s, r.parameters.next_round_s))


@kernel
def _needed_s(r: Round, i: int, speed: float) -> float:
    rows = r.jobs.rows
    slowest = np.inf
    for device_type in range(r.jobs.steps_per_s.shape[1]):
        if r.jobs.steps_per_s[i, device_type] > 0.0:
            slowest = min(slowest, r.jobs.steps_per_s[i, device_type])
    restarts_s = rows.attempt[i] * r.parameters.restart_s
    overdue = is_overdue(
        rows.held_s[i], restarts_s, rows.total_steps[i] / slowest, r.parameters.round_s
    )
    left = max(rows.total_steps[i] - rows.done_steps[i], 0.0)
    return ends_in_s(
        left, speed, rows.time_limit_s[i] - rows.held_s[i], r.parameters.restart_s, overdue
    )


@kernel
def may_backfill(r: Round, i: int, device_type: int) -> bool:
    """True if a job can start now without delaying a reserved one; its devices are then marked as
    used."""
    rows = r.jobs.rows
    if not runs_to_end(rows.preemptible[i]):
        return True
    gang, needed_s = (
        rows.gang[i],
        _needed_s(r, i, speed_on(r.jobs, i, device_type, r.layout.largest_server)),
    )
    if earliest_s(r, device_type, gang, needed_s) > r.time_s:
        return False
    add(r, device_type, -gang, r.time_s, r.time_s + needed_s)
    r.ends_s[i] = r.time_s + needed_s
    return True


@kernel
def start_or_reserve(r: Round, i: int, wanted: int) -> None:
    """Grant a reserved job devices now, on the type that it wants or on its fastest, else reserve
    them where it ends first."""
    rows = r.jobs.rows
    num_types, gang = r.free.shape[0], rows.gang[i]
    best, best_speed, later, later_s, later_end_s = -1, 0.0, -1, np.inf, np.inf
    for device_type in range(num_types):
        speed = speed_on(r.jobs, i, device_type, r.layout.largest_server)
        if speed <= 0.0:
            continue
        needed_s = _needed_s(r, i, speed)
        start_s = earliest_s(r, device_type, gang, needed_s)
        if start_s <= r.time_s and gang <= r.free[device_type]:
            if not r.is_withdrawn[i * num_types + device_type]:
                if device_type == wanted or (speed > best_speed and (best < 0 or best != wanted)):
                    best, best_speed = device_type, speed
                continue
            start_s = after_now_s(r, device_type)
        end_s = start_s + needed_s
        is_sooner = end_s < later_end_s or (end_s == later_end_s and start_s < later_s)
        if later < 0 or is_sooner:
            later, later_s, later_end_s = device_type, start_s, end_s
    if best >= 0 and r.time_s + _needed_s(r, i, best_speed) <= later_end_s:
        needed_s = _needed_s(r, i, best_speed)
        r.device_type[i] = best
        r.free[best] -= gang
        stops_s = r.time_s + needed_s
        if not runs_to_end(rows.preemptible[i]) and not r.parameters.runs_in_arrival_order:
            stops_s = min(stops_s, r.time_s + r.parameters.round_s)
        add(r, best, -gang, r.time_s, stops_s)
    elif later >= 0:
        _reserve(r, i, later, later_s, later_end_s)


@kernel
def _reserve(r: Round, i: int, device_type: int, start_s: float, end_s: float) -> None:
    rows = r.jobs.rows
    gang = rows.gang[i]
    if gang > 1 and r.jobs.spread_steps_per_s[i, device_type] <= 0.0:
        server, free_s = _first_free_server(r, device_type, gang)
        if server >= 0:
            r.server_needed_s[server] = free_s
            end_s += max(free_s - start_s, 0.0) if start_s < np.inf else 0.0
            start_s = max(start_s, free_s)
    rows.reserved_s[i] = start_s
    if start_s < np.inf:
        add(r, device_type, -gang, start_s, end_s)
    else:
        # It is unknown when enough devices will be free, so those that become free are kept.
        block_type(r, device_type)


@kernel
def _first_free_server(r: Round, device_type: int, gang: int) -> tuple[int, float]:
    """The first server without a reservation on which a gang fits, and the moment."""
    best, best_s = -1, np.inf
    for server in range(r.layout.server_type.shape[0]):
        first, stop = r.layout.server_ptr[server], r.layout.server_ptr[server + 1]
        is_open = r.server_needed_s[server] == np.inf
        if r.layout.server_type[server] != device_type or stop - first < gang or not is_open:
            continue
        # The gang-th earliest of its devices, found by counting those that are no later.
        for at in range(first, stop):
            free_s = _free_s(r, r.layout.order[at])
            num_earlier = 0
            for other in range(first, stop):
                if _free_s(r, r.layout.order[other]) <= free_s:
                    num_earlier += 1
            if num_earlier >= gang and (best < 0 or free_s < best_s):
                best, best_s = server, free_s
    return best, best_s


@kernel
def _free_s(r: Round, device: int) -> float:
    row = r.holders[device, 0]
    if row < 0 or r.device_type[row] < 0:
        return r.time_s
    free_s = given_back_s(r, row)
    other = r.holders[device, 1]
    return max(free_s, given_back_s(r, other)) if other >= 0 else free_s


@kernel
def fill_in_line(r: Round) -> None:
    """First come, first served with conservative backfill: in order of priority and arrival, each
    job starts or gets the earliest time that delays nobody before it."""
    rows = r.jobs.rows
    in_line, level = 0, _next_level(r, np.inf)
    while level > -np.inf:
        for i in range(rows.shape[0]):
            is_waiting = rows.phase[i] == WAITING and rows.over_quota[i] == 0
            if not is_waiting or rows.priority[i] != level or in_line >= _MAX_IN_LINE:
                continue
            in_line += 1
            start_or_reserve(r, i, -1)
            if r.device_type[i] >= 0:
                speed = speed_on(r.jobs, i, r.device_type[i], r.layout.largest_server)
                r.ends_s[i] = r.time_s + _needed_s(r, i, speed)
        level = _next_level(r, level)


@kernel
def _next_level(r: Round, below: float) -> float:
    """The highest priority of waiting jobs below a level; minus infinity for none."""
    rows = r.jobs.rows
    level = -np.inf
    for i in range(rows.shape[0]):
        if rows.phase[i] == WAITING and level < rows.priority[i] < below:
            level = float(rows.priority[i])
    return level


# ── wishes ───────────────────────────────────────────────────────────────────────────────────────


@kernel
def grant_wishes(r: Round, num_parts: int) -> None:
    """Grant wishes part by part as long as devices are left.

    A wish below ``jobs x types`` is a job on a device type; the others are rows of ``pairs``
    (profile, profile, device type) and go to the first free jobs in the queues of both profiles.
    Reserved jobs come first; other jobs may use their devices until the reserved start.
    """
    for part in range(num_parts):
        start, stop, device_type = r.parts[part, 0], r.parts[part, 1], r.parts[part, 2]
        num_free = 0
        for other in range(r.free.shape[0]):
            if device_type < 0 or other == device_type:
                num_free += r.free[other]
        # Without free devices, reserved jobs still get a predicted start.
        if num_free > 0 or r.has_timeline[0]:
            sort_part(r, start, stop)
            _grant(r, start, stop)


@kernel
def take_back_moves(r: Round) -> bool:
    """Undo moves that gain nothing; returns True if there were any.

    A job alone that was given another device type on which it is no faster stays, unless its
    devices went to another job.
    """
    rows = r.jobs.rows
    is_changed = False
    for i in range(rows.shape[0]):
        before, device_type = r.before[i], r.device_type[i]
        if before < 0 or device_type < 0 or device_type == before:
            continue
        is_alone = rows.partner[i] < 0 and r.partner[i] < 0
        # It may be spread over servers now, or its speed may have been overestimated at its start.
        present = min(rows.rate[i], speed_on(r.jobs, i, before, r.layout.largest_server))
        gains = speed_on(r.jobs, i, device_type, r.layout.largest_server) > present
        if is_alone and not gains and rows.gang[i] <= r.free[before]:
            r.free[device_type] += rows.gang[i]
            r.free[before] -= rows.gang[i]
            r.device_type[i] = before
            is_changed = True
    return is_changed


@kernel
def _grant(r: Round, start: int, stop: int) -> None:
    rows = r.jobs.rows
    num_types = r.free.shape[0]
    has_timeline = r.has_timeline[0]
    num_single = rows.shape[0] * num_types
    for at in range(start, stop):
        wish = r.order[at]
        if wish >= num_single:
            if not r.is_withdrawn[wish]:
                _grant_pair(r, wish - num_single)
            continue
        job, device_type = wish // num_types, wish % num_types
        if r.device_type[job] >= 0 or rows.reserved_s[job] > 0.0:
            continue
        if r.goes_first[job] and has_timeline:
            start_or_reserve(r, job, device_type)
            continue
        fits = rows.gang[job] <= r.free[device_type] and not r.is_withdrawn[wish]
        if fits and has_timeline:
            fits = may_backfill(r, job, device_type)
        if fits:
            r.device_type[job] = device_type
            r.free[device_type] -= rows.gang[job]
        elif r.goes_first[job] and not r.is_withdrawn[wish]:
            # It gets the devices at the next round, so nothing is started on them until then.
            r.free[device_type] = 0


@kernel
def _grant_pair(r: Round, at: int) -> None:
    rows = r.jobs.rows
    a, b, device_type = r.asked.pairs[at, 0], r.asked.pairs[at, 1], r.asked.pairs[at, 2]
    one = _next_of(r, a, -1)
    other = _next_of(r, b, one)
    if one < 0 or other < 0 or rows.gang[one] > r.free[device_type]:
        return
    r.device_type[one] = device_type
    r.device_type[other] = device_type
    r.partner[one] = other
    r.partner[other] = one
    r.free[device_type] -= rows.gang[one]


@kernel
def _next_of(r: Round, profile: int, but: int) -> int:
    """The first job of a profile without devices; ``queue_at`` skips those that have some."""
    at, end = r.queue_at[profile, 0], r.queue_at[profile, 1]
    while at < end and r.device_type[r.asked.queue[at]] >= 0:
        at += 1
    r.queue_at[profile, 0] = at
    while at < end and (r.device_type[r.asked.queue[at]] >= 0 or r.asked.queue[at] == but):
        at += 1
    return r.asked.queue[at] if at < end else -1
