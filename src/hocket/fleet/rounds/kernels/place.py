"""Devices for the chosen jobs, and what that stops and starts. O(devices + starts x servers)."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.kernels.choose import choose, stay
from hocket.fleet.rounds.kernels.rates import row_of, set_rate
from hocket.fleet.rounds.kernels.reserve import fill_in_line, foresee
from hocket.fleet.rounds.kernels.timeline import Timeline
from hocket.fleet.rounds.kernels.vacate import vacate_server
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Floor, Pace, RoundChoice, Speeds, StopsAndStarts, Wishes
from hocket.kernels import kernel

_WAITING, _RUNNING = 0, 1
_PREEMPTED, _MOVED = 0, 1


@kernel
def hand_out(
    time_s: float,
    jobs: Jobs,
    num_parts: int,
    wishes: Wishes,
    pace: Pace,
    is_final: bool,
    largest_server: LongArray,
    speeds: Speeds,
    choice: RoundChoice,
    floor: Floor,
    changes: StopsAndStarts,
    timeline: Timeline,
) -> bool:
    """Grant wishes in their order, give devices to those granted, and write both down.

    Writes nothing to ``jobs`` and returns False where a gang was granted devices that are on no one
    server: its wish is withdrawn then, and others may have them, unless ``is_final`` says that it
    leaves them idle.
    """
    _find_rows(jobs, floor)
    for i in range(jobs.rows.shape[0]):
        choice.before[i] = jobs.rows.kind[i] if jobs.rows.phase[i] == _RUNNING else -1
        choice.kind[i] = choice.before[i] if wishes.is_kept[i] else -1
        choice.partner[i] = -1
        choice.ends_s[i] = -np.inf
        jobs.rows.reserved_s[i] = 0.0
        if choice.kind[i] >= 0 and jobs.rows.partner[i] >= 0:
            choice.partner[i] = row_of(jobs, jobs.rows.partner[i])
    _count_kept(wishes, floor, choice)
    foresee(time_s, jobs, pace, wishes, choice, floor, timeline)
    if pace.backfills:
        fill_in_line(time_s, jobs, pace, largest_server, wishes, choice, floor, timeline)
        num_parts = 0
    choose(time_s, jobs, num_parts, pace, largest_server, wishes, choice, floor, timeline)
    if pace.keeps_equal and not pace.by_share:
        is_changed = stay(jobs, largest_server, choice)
        # Others may want what is free now; a pair would be granted once more.
        if is_changed and wishes.pairs.shape[0] == 0:
            choose(time_s, jobs, num_parts, pace, largest_server, wishes, choice, floor, timeline)
    if pace.by_share:
        for i in range(jobs.rows.shape[0]):
            if jobs.rows.has_share[i] == 0 and not wishes.is_kept[i]:
                choice.kind[i] = -1
    _stay(jobs, choice, changes)
    _release(floor, changes)
    if not _place(time_s, jobs, pace, wishes, choice, floor, changes) and not is_final:
        return False
    _write_stops(time_s, jobs, pace, choice, changes)
    _write_starts(time_s, jobs, pace, choice, changes)
    _set_rates(jobs, speeds, choice, changes)
    _name(jobs, floor, changes)
    return True


@kernel
def _find_rows(jobs: Jobs, floor: Floor) -> None:
    """From numbers to rows, by a table of the last bits; searching for each takes far longer."""
    mask = floor.slots.shape[0] - 1
    for slot in range(floor.slots.shape[0]):
        floor.slots[slot] = -1
    for i in range(jobs.rows.shape[0]):
        floor.slots[jobs.rows.number[i] & mask] = i
    for device in range(floor.holders.shape[0]):
        for place in range(2):
            number = floor.holders[device, place]
            if number >= 0:
                row = floor.slots[number & mask]
                if row < 0 or jobs.rows.number[row] != number:
                    row = row_of(jobs, number)
                floor.holders[device, place] = row


@kernel
def _set_rates(jobs: Jobs, speeds: Speeds, choice: RoundChoice, changes: StopsAndStarts) -> None:
    """Partners and rates of all jobs; one that stays alone keeps both."""
    for i in range(jobs.rows.shape[0]):
        partner = choice.partner[i]
        if changes.stays[i] and partner < 0 and jobs.rows.partner[i] < 0:
            continue
        number = jobs.rows.number[partner] if partner >= 0 else -1
        if jobs.rows.partner[i] != number and changes.stays[i]:
            # What was done since the last report was not all done in this company.
            jobs.rows.measured_s[i] = np.inf
        jobs.rows.partner[i] = number
        if choice.kind[i] >= 0:
            set_rate(jobs, i, partner, speeds)


@kernel
def _count_kept(wishes: Wishes, floor: Floor, choice: RoundChoice) -> None:
    for server in range(floor.num_free.shape[0]):
        for at in range(floor.server_ptr[server], floor.server_ptr[server + 1]):
            row = floor.holders[floor.order[at], 0]
            if row >= 0 and wishes.is_kept[row]:
                choice.free[floor.server_kind[server]] -= 1


@kernel
def _stay(jobs: Jobs, choice: RoundChoice, changes: StopsAndStarts) -> None:
    """Jobs stay where they are if they may stay on the kind, and beside whom they are."""
    has_pairs = False
    for i in range(choice.kind.shape[0]):
        changes.stays[i] = choice.before[i] >= 0 and choice.kind[i] == choice.before[i]
        changes.is_spread[i] = jobs.rows.is_spread[i]
        has_pairs = has_pairs or choice.partner[i] >= 0 or jobs.rows.partner[i] >= 0
    if not has_pairs:
        return
    for i in range(choice.kind.shape[0]):
        if not changes.stays[i]:
            continue
        old, new = row_of(jobs, jobs.rows.partner[i]), choice.partner[i]
        if old == new:
            continue
        # Of two jobs that would both stay but may not both, the later one moves.
        parts = 0 <= old < i and changes.stays[old]
        joins = 0 <= new < i and changes.stays[new]
        is_apart = changes.is_spread[i] and not _can_spread(jobs, i, choice)
        changes.stays[i] = not (parts or joins or is_apart)


@kernel
def _release(floor: Floor, changes: StopsAndStarts) -> None:
    for device in range(floor.holders.shape[0]):
        for slot in range(2):
            row = floor.holders[device, slot]
            if row >= 0 and not changes.stays[row]:
                floor.holders[device, slot] = -1
        if floor.holders[device, 0] < 0:
            floor.holders[device, 0] = floor.holders[device, 1]
            floor.holders[device, 1] = -1
    for server in range(floor.num_free.shape[0]):
        floor.num_free[server] = 0
        for at in range(floor.server_ptr[server], floor.server_ptr[server + 1]):
            floor.num_free[server] += floor.holders[floor.order[at], 0] < 0


@kernel
def _place(
    time_s: float,
    jobs: Jobs,
    pace: Pace,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    changes: StopsAndStarts,
) -> bool:
    """Large gangs first, so that they find whole servers; smaller jobs may have to move.

    Before all come gangs that waited too long and need one server: nobody stays in their way.
    Returns whether all that were granted devices got them.
    """
    _place_reserved(time_s, jobs, pace, wishes, choice, floor, changes)
    is_done, gang = True, 0
    for i in range(jobs.rows.shape[0]):
        if choice.kind[i] >= 0 and not changes.stays[i] and not changes.is_placed[i]:
            gang = max(gang, jobs.rows.gang[i])
    while gang > 0:
        smaller = 0
        for i in range(jobs.rows.shape[0]):
            if choice.kind[i] < 0 or changes.stays[i] or changes.is_placed[i]:
                continue
            if jobs.rows.gang[i] < gang:
                smaller = max(smaller, jobs.rows.gang[i])
                continue
            kind, partner = choice.kind[i], choice.partner[i]
            if not pace.keeps_running and not _can_spread(jobs, i, choice):
                vacate_server(jobs, kind, gang, time_s, False, wishes, floor, changes)
            if _place_one(jobs, i, choice, floor, changes):
                continue
            if partner >= 0 or not wishes.is_reserved[i] or pace.reserve_after_s < np.inf:
                _withdraw(jobs, i, partner, kind, wishes)
                is_done = False
        # Those that moved away are smaller.
        for i in range(jobs.rows.shape[0]):
            if choice.kind[i] >= 0 and not changes.stays[i] and jobs.rows.gang[i] < gang:
                smaller = max(smaller, jobs.rows.gang[i])
        gang = smaller
    return is_done


@kernel
def _withdraw(jobs: Jobs, i: int, partner: int, kind: int, wishes: Wishes) -> None:
    """Take back the wish of a job, or those of all pairs like it and its partner."""
    num_kinds = jobs.shares.shape[1]
    if partner < 0:
        wishes.is_withdrawn[i * num_kinds + kind] = True
        return
    first_pair = jobs.rows.shape[0] * num_kinds
    one, two = jobs.rows.profile[i], jobs.rows.profile[partner]
    for pair in range(wishes.pairs.shape[0]):
        is_alike = wishes.pairs[pair, 0] == min(one, two) and wishes.pairs[pair, 1] == max(one, two)
        if is_alike and wishes.pairs[pair, 2] == kind:
            wishes.is_withdrawn[first_pair + pair] = True


@kernel
def _place_reserved(
    time_s: float,
    jobs: Jobs,
    pace: Pace,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    changes: StopsAndStarts,
) -> None:
    num_kinds = choice.free.shape[0]
    num_single = jobs.rows.shape[0] * num_kinds
    for at in range(wishes.parts[0, 0], wishes.parts[0, 1]):
        wish = wishes.order[at]
        i, kind = wish // num_kinds, wish % num_kinds
        if pace.keeps_running or wish >= num_single or not wishes.is_reserved[i]:
            continue
        is_bound = jobs.spread_steps_per_s[i, kind] <= 0.0 and choice.partner[i] < 0
        if is_bound and choice.kind[i] == kind and not changes.stays[i]:
            need = jobs.rows.gang[i]
            vacate_server(jobs, kind, need, time_s, False, wishes, floor, changes)
            vacate_server(jobs, kind, need, time_s - pace.min_turn_s, True, wishes, floor, changes)
            _place_one(jobs, i, choice, floor, changes)


@kernel
def _place_one(
    jobs: Jobs, i: int, choice: RoundChoice, floor: Floor, changes: StopsAndStarts
) -> bool:
    """Give a job its devices; False where it can run on one server only and none has room."""
    partner, kind, need = choice.partner[i], choice.kind[i], jobs.rows.gang[i]
    joins = partner >= 0 and (changes.stays[partner] or changes.is_placed[partner])
    ends_s = choice.ends_s[i]
    best = -1 if joins else _best_server(kind, need, ends_s, floor)
    is_spread = best < 0 or floor.num_free[best] < need
    if joins:
        is_spread = changes.is_spread[partner]
    is_enough = joins or not is_spread or _free_on(kind, ends_s, floor) >= need
    if not is_enough or (is_spread and not _can_spread(jobs, i, choice)):
        choice.kind[i] = -1
        choice.partner[i] = -1
        if partner >= 0:
            choice.partner[partner] = -1
        return False
    changes.is_spread[i] = is_spread
    if joins:
        _join(i, partner, floor, changes)
    else:
        _take(i, kind, need, best, ends_s, floor, changes)
    at = changes.size[1]
    changes.started[0, at] = i
    changes.device_ptr[at + 1] = changes.size[2]
    changes.size[1] = at + 1
    changes.is_placed[i] = True
    return True


@kernel
def _can_spread(jobs: Jobs, i: int, choice: RoundChoice) -> bool:
    """True if a job, and the one beside it, can run on several servers."""
    kind, partner = choice.kind[i], choice.partner[i]
    is_able: bool = jobs.spread_steps_per_s[i, kind] > 0.0
    return is_able and (partner < 0 or jobs.spread_steps_per_s[partner, kind] > 0.0)


@kernel
def _join(i: int, partner: int, floor: Floor, changes: StopsAndStarts) -> None:
    """Take the second place on the devices of a partner."""
    size = changes.size[2]
    for device in range(floor.holders.shape[0]):
        if floor.holders[device, 0] == partner:
            floor.holders[device, 1] = i
            changes.device[size] = device
            size += 1
    changes.size[2] = size


@kernel
def _free_on(kind: int, ends_s: float, floor: Floor) -> int:
    """Free devices on servers that a job may have, which ends by then."""
    num_free = 0
    for server in range(floor.num_free.shape[0]):
        if floor.server_kind[server] == kind and ends_s <= floor.closed_s[server]:
            num_free += floor.num_free[server]
    return num_free


@kernel
def _best_server(kind: int, need: int, ends_s: float, floor: Floor) -> int:
    """The fullest server with room for all, else the emptiest; -1 where all are full. Servers that
    a reserved gang needs before the job ends count as full."""
    best, num_servers = -1, floor.num_free.shape[0]
    first = floor.first[kind]
    while first < num_servers and (floor.server_kind[first] != kind or floor.num_free[first] == 0):
        first += 1
    floor.first[kind] = first
    for server in range(first, num_servers):
        num_free = floor.num_free[server]
        if floor.server_kind[server] != kind or num_free == 0 or ends_s > floor.closed_s[server]:
            continue
        if num_free == need:
            return server
        if best < 0:
            best = server
        elif num_free >= need:
            if floor.num_free[best] < need or num_free < floor.num_free[best]:
                best = server
        elif floor.num_free[best] < num_free:
            best = server
    return best


@kernel
def _take(
    i: int,
    kind: int,
    need: int,
    best: int,
    ends_s: float,
    floor: Floor,
    changes: StopsAndStarts,
) -> None:
    while need > 0 and best >= 0:
        for at in range(floor.server_ptr[best], floor.server_ptr[best + 1]):
            device = floor.order[at]
            if need > 0 and floor.holders[device, 0] < 0:
                floor.holders[device, 0] = i
                floor.num_free[best] -= 1
                changes.device[changes.size[2]] = device
                changes.size[2] += 1
                need -= 1
        if need > 0:
            best = _best_server(kind, need, ends_s, floor)


@kernel
def _write_stops(
    time_s: float, jobs: Jobs, pace: Pace, choice: RoundChoice, changes: StopsAndStarts
) -> None:
    size = 0
    for i in range(jobs.rows.shape[0]):
        if choice.before[i] < 0:
            continue
        saves = jobs.rows.preemptible[i] > 0 and jobs.rows.losses[i] == 0
        if saves and (not pace.keeps_running or not changes.stays[i]):
            # A checkpoint per round and per stop: more than a round of work is never lost.
            jobs.rows.saved_steps[i] = jobs.rows.done_steps[i]
        if changes.stays[i]:
            continue
        jobs.rows.done_steps[i] = jobs.rows.saved_steps[i]
        changes.stopped[0, size] = jobs.rows.number[i]
        changes.stopped[1, size] = jobs.rows.attempt[i]
        changes.stopped[2, size] = _MOVED if choice.kind[i] >= 0 else _PREEMPTED
        jobs.rows.phase[i] = _WAITING
        jobs.rows.kind[i] = -1
        jobs.rows.waiting_since_s[i] = time_s
        size += 1
    changes.size[0] = size


@kernel
def _write_starts(
    time_s: float, jobs: Jobs, pace: Pace, choice: RoundChoice, changes: StopsAndStarts
) -> None:
    for at in range(changes.size[1]):
        i = changes.started[0, at]
        jobs.rows.phase[i] = _RUNNING
        jobs.rows.kind[i] = choice.kind[i]
        jobs.rows.attempt[i] += 1
        jobs.rows.is_spread[i] = changes.is_spread[i]
        jobs.rows.started_s[i] = time_s
        jobs.rows.ready_s[i] = time_s + pace.restart_s
        jobs.rows.measured_s[i] = time_s + pace.restart_s
        jobs.rows.measured_steps[i] = jobs.rows.done_steps[i]


@kernel
def _name(jobs: Jobs, floor: Floor, changes: StopsAndStarts) -> None:
    """From rows back to numbers."""
    for at in range(changes.size[1]):
        i = changes.started[0, at]
        changes.started[0, at] = jobs.rows.number[i]
        changes.started[1, at] = jobs.rows.attempt[i]
        changes.started[2, at] = jobs.rows.partner[i]
    for device in range(floor.holders.shape[0]):
        for slot in range(2):
            if floor.holders[device, slot] >= 0:
                floor.holders[device, slot] = jobs.rows.number[floor.holders[device, slot]]
