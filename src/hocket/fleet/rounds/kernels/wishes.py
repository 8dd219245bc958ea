"""Wishes and their urgency, in parts that are sorted when their turn comes.

Devices are mostly gone before those without a deficit are asked, so that these need no sorting.
A stable merge sort by several keys: O(wishes log wishes).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.rounds.kernels.rates import row_of, speed_on
from hocket.fleet.rounds.rules import (
    FILLING_LAST,
    RESERVED_FIRST,
    UNITS_PER_ROUND,
    has_large_deficit,
    has_waited_too_long,
    is_kept,
    is_overdue,
    runs_to_end,
    stop_cost_rounds,
    urgency_filling,
    urgency_of_deficit,
)
from hocket.fleet.rounds.state import NOT_SOLVED, RUNNING, SHARE_ONLY, WAITING
from hocket.fleet.rounds.tables import Round
from hocket.kernels import kernel

# Ranks of wishes: those with a deficit come before those that only fill free devices.
_DEFICIT, _FILLING, _NO_WISH = 0, 1, 2


@kernel
def order_wishes(r: Round) -> int:
    """Collect and rank the wishes of all jobs and pairs; returns the number of parts."""
    rows = r.jobs.rows
    _count_stoppable(r)
    _mark_kept(r)
    if r.parameters.by_share:
        return order_by_share(r)
    first_pair = rows.shape[0] * r.jobs.shares.shape[1]
    for pair in range(r.asked.urgency.shape[0]):
        r.keys[0, first_pair + pair] = r.asked.urgency[pair]
    return order_by_deficit(r)


@kernel
def _mark_kept(r: Round) -> None:
    """Mark running jobs that cannot be stopped or moved in this round, and their partners."""
    rows = r.jobs.rows
    keeps_all = r.parameters.is_refill or r.parameters.runs_in_arrival_order
    for i in range(rows.shape[0]):
        ran_s = r.time_s - rows.started_s[i]
        bound = runs_to_end(rows.preemptible[i])
        is_running = rows.phase[i] == RUNNING
        # Devices were collected for this gang while others could not be stopped, so it gets a turn
        # before it is preempted.
        is_collected = rows.gang[i] > 1 and r.parameters.reserve_after_s < np.inf
        least_s = r.parameters.min_turn_s if is_collected else 0.0
        r.is_kept[i] = is_kept(is_running, bound, ran_s, least_s, keeps_all)
    for i in range(rows.shape[0]):
        if r.is_kept[i] and rows.partner[i] >= 0:
            r.is_kept[row_of(r.jobs, rows.partner[i])] = True


@kernel
def _count_stoppable(r: Round) -> None:
    """Count devices that are free or held by preemptible jobs, by type and on the best server."""
    r.stoppable[:] = 0
    r.stoppable_together[:] = 0
    for server in range(r.layout.server_type.shape[0]):
        device_type, count = r.layout.server_type[server], 0
        for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
            row = r.held[r.layout.order[at], 0]
            count += row < 0 or not runs_to_end(r.jobs.rows.preemptible[row])
        r.stoppable[device_type] += count
        r.stoppable_together[device_type] = max(r.stoppable_together[device_type], count)


@kernel
def order_by_share(r: Round) -> int:
    """Rank wishes as Gavel does: per device type by share over time received, then deficit, then
    share.

    Returns the number of parts: for each device type the jobs with a share, then the others.
    """
    rows = r.jobs.rows
    num_types: int = r.asked.device_types.shape[0]
    size = 0
    for at in range(num_types):
        device_type = r.asked.device_types[at]
        _rank_by_share(r, device_type, num_types)
        for part in range(2):
            start = size
            for i in range(rows.shape[0]):
                wish = i * num_types + device_type
                if r.rank[wish] == part:
                    r.order[size] = wish
                    size += 1
            _set_part(r, 2 * at + part, start, size, device_type)
    return 2 * num_types


@kernel
def _rank_by_share(r: Round, device_type: int, num_types: int) -> None:
    rows = r.jobs.rows
    for i in range(rows.shape[0]):
        wish, share = i * num_types + device_type, r.jobs.shares[i, device_type]
        speed = speed_on(r.jobs, i, device_type, r.layout.largest_server)
        keeps_off = rows.has_share[i] == SHARE_ONLY and share <= 0.0
        # Phases above running are paused, ended or blocked.
        if rows.phase[i] > RUNNING or r.is_kept[i] or speed <= 0.0 or keeps_off:
            r.rank[wish] = _NO_WISH
            continue
        # Jobs that arrived since the last allocation come after all others.
        has_share = rows.has_share[i] != NOT_SOLVED
        r.keys[0, wish] = (
            share / max(r.jobs.received_s[i, device_type], 1e-9) if has_share else -1.0
        )
        r.keys[1, wish] = np.rint(r.jobs.credit_s[i, device_type] * 1000.0)
        r.keys[2, wish] = share
        r.rank[wish] = _DEFICIT if r.keys[0, wish] > 0.0 else _FILLING


@kernel
def _set_part(r: Round, part: int, start: int, stop: int, device_type: int) -> None:
    r.parts[part, 0] = start
    r.parts[part, 1] = stop
    r.parts[part, 2] = device_type


@kernel
def order_by_deficit(r: Round) -> int:
    """Rank wishes of jobs and pairs by deficit; ties go to the job that would lose most work.

    Returns the number of parts: wishes with a deficit, then wishes that only fill free devices.
    """
    rows = r.jobs.rows
    if not r.parameters.is_refill:
        _limit_deficits(r, r.parameters.max_deficit_s)
    _rank_by_deficit(r)
    first_pair = rows.shape[0] * r.jobs.shares.shape[1]
    for pair in range(r.asked.pairs.shape[0]):
        r.rank[first_pair + pair] = _DEFICIT
    size = 0
    for part in range(2):
        start = size
        for wish in range(r.rank.shape[0]):
            if r.rank[wish] == part:
                r.order[size] = wish
                size += 1
        _set_part(r, part, start, size, -1)
    return 2


@kernel
def _limit_deficits(r: Round, most_s: float) -> None:
    rows = r.jobs.rows
    for i in range(rows.shape[0]):
        for j in range(r.jobs.credit_s.shape[1]):
            r.jobs.credit_s[i, j] = min(max(r.jobs.credit_s[i, j], -most_s), most_s)
        rows.pair_credit_s[i] = min(max(rows.pair_credit_s[i], -most_s), most_s)


@kernel
def _rank_by_deficit(r: Round) -> None:
    """Compute rank and sort keys of the wishes of all jobs."""
    rows, largest = r.jobs.rows, r.layout.largest_server
    num_types = r.jobs.shares.shape[1]
    for i in range(rows.shape[0]):
        for j in range(num_types):
            r.rank[i * num_types + j] = _NO_WISH
        phase, gang = rows.phase[i], rows.gang[i]
        if phase > RUNNING or r.is_kept[i] or rows.over_quota[i] > 0:
            continue
        # A job in a pair has no claim to stay where it is alone.
        here = rows.device_type[i] if rows.partner[i] < 0 else -1
        best, slowest, is_reserved, fits_by_stops = 1e-300, np.inf, False, False
        for j in range(num_types):
            speed = speed_on(r.jobs, i, j, largest)
            best = max(best, speed)
            slowest = min(slowest, speed) if speed > 0.0 else slowest
            can_spread = r.jobs.spread_steps_per_s[i, j] > 0.0
            room = r.stoppable[j] if can_spread else r.stoppable_together[j]
            fits_by_stops = fits_by_stops or (speed > 0.0 and gang <= room)
            # Device types on which a job is equally fast count as one: its deficit holds for any.
            deficit_s = r.jobs.credit_s[i, j]
            for k in range(num_types):
                is_wanted = k != j and (r.jobs.shares[i, k] > 0.0 or k == here)
                if is_wanted and speed_on(r.jobs, i, k, largest) == speed:
                    deficit_s += r.jobs.credit_s[i, k]
            r.keys[0, i * num_types + j] = deficit_s
            is_reserved |= has_large_deficit(
                deficit_s, r.jobs.shares[i, j], r.parameters.patience_s
            )
        waited_s = r.time_s - rows.waiting_since_s[i]
        waits_too_long = has_waited_too_long(
            gang,
            phase == WAITING,
            waited_s,
            r.parameters.reserve_after_s,
            fits_by_stops,
            rows.reserved_s[i] > 0.0,
        )
        r.goes_first[i] = is_reserved or waits_too_long
        has_waited = waited_s >= r.parameters.stickiness_rounds * r.parameters.round_s
        is_waiting_gang = gang > 1 and phase == WAITING and has_waited
        left = max(rows.total_steps[i] - rows.done_steps[i], 0.0)
        restarts_s = rows.attempt[i] * r.parameters.restart_s
        # A job that has run much longer than it claimed to need is not expected to end soon.
        if is_overdue(
            rows.held_s[i], restarts_s, rows.total_steps[i] / slowest, r.parameters.round_s
        ):
            left = np.inf
        lost, cost = 0.0, 0.0
        if phase == RUNNING and rows.rate[i] > 0.0:
            lost_s = (rows.done_steps[i] - rows.saved_steps[i]) / rows.rate[i]
            lost = np.floor(lost_s / r.parameters.round_s * UNITS_PER_ROUND)
            cost = stop_cost_rounds(
                r.parameters.restart_s,
                lost_s,
                rows.losses[i],
                r.parameters.stickiness_rounds,
                r.parameters.round_s,
            )
        for j in range(num_types):
            wish, speed = i * num_types + j, speed_on(r.jobs, i, j, largest)
            if speed <= 0.0:
                continue
            if r.jobs.shares[i, j] > 0.0:
                credit_s = r.keys[0, wish]
                stays = r.parameters.stickiness_rounds + cost if here == j else 0.0
                urgency = urgency_of_deficit(
                    credit_s,
                    left,
                    speed,
                    stays + rows.group_shift[i],
                    r.parameters.slack_rounds,
                    r.parameters.round_s,
                    rows.priority[i],
                )
                if waits_too_long:
                    urgency = RESERVED_FIRST + waited_s / r.parameters.round_s
                elif is_reserved:
                    # Deficits are limited, and at the limit a gang that finds no place looks like
                    # all others. So gangs that wait there come first. A single device becomes free
                    # sooner or later, so other jobs need no such rule.
                    is_first = is_waiting_gang and credit_s >= r.parameters.max_deficit_s
                    urgency += (2.0 if is_first else 1.0) * RESERVED_FIRST
            elif rows.has_share[i] == SHARE_ONLY:
                continue
            else:
                urgency = urgency_filling(speed, best, here == j)
            r.keys[0, wish] = urgency
            r.keys[1, wish] = lost if here == j else 0.0
            r.rank[wish] = _FILLING if r.keys[0, wish] < 0.5 * FILLING_LAST else _DEFICIT


@kernel
def sort_part(r: Round, start: int, stop: int) -> None:
    """Sort a part of the wishes by descending keys (stable merge sort)."""
    order, other = r.order, r.scratch
    # First keys are moved with the order; looking them up for each comparison takes twice as long.
    key, other_key = r.sort_keys[0], r.sort_keys[1]
    for at in range(start, stop):
        key[at] = r.keys[0, order[at]]
    width, is_swapped = 1, False
    while width < stop - start:
        low = start
        while low < stop:
            middle, high = min(low + width, stop), min(low + 2 * width, stop)
            left, right = low, middle
            for at in range(low, high):
                takes_right = left >= middle
                if left < middle and right < high:
                    takes_right = key[right] > key[left]
                    if key[right] == key[left]:
                        takes_right = _goes_before(r.keys, order[right], order[left])
                taken = right if takes_right else left
                other[at], other_key[at] = order[taken], key[taken]
                if takes_right:
                    right += 1
                else:
                    left += 1
            low = high
        order, other = other, order
        key, other_key = other_key, key
        width, is_swapped = width * 2, not is_swapped
    if is_swapped:
        for at in range(start, stop):
            r.order[at] = r.scratch[at]


@kernel
def _goes_before(keys: FloatArray, one: int, other: int) -> bool:
    """True if a wish comes before another with the same first key."""
    for key in range(1, keys.shape[0]):
        if keys[key, one] != keys[key, other]:
            return bool(keys[key, one] > keys[key, other])
    return False
