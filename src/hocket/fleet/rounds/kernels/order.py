"""Wishes and their urgency, in parts that are sorted when their turn comes.

Devices are mostly gone before those without a deficit are asked, so that these need no sorting.
A stable merge sort by several keys: O(wishes log wishes).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.rounds.rules import (
    FILLING_LAST,
    RESERVED_FIRST,
    UNITS_PER_ROUND,
    has_large_deficit,
    has_waited_too_long,
    is_overdue,
    stop_cost_rounds,
    urgency_filling,
    urgency_of_deficit,
)
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Pace, Wishes
from hocket.kernels import kernel

_WAITING, _RUNNING = 0, 1
_OWED, _FILLING, _NO_WISH = 0, 1, 2
_ONLY_SHARE = 2
"""Mark of a job that fills no devices of which it has no share."""


@kernel
def order_by_share(jobs: Jobs, kinds: LongArray, largest_server: LongArray, wishes: Wishes) -> int:
    """Gavel's order: kind by kind, share over time received, then debt, then share.

    Returns the number of parts: for each kind those who have a share of it, then the others.
    """
    num_kinds: int = kinds.shape[0]
    size = 0
    for at in range(num_kinds):
        kind = kinds[at]
        _rank_by_share(jobs, kind, num_kinds, largest_server, wishes)
        for part in range(2):
            start = size
            for i in range(jobs.rows.shape[0]):
                wish = i * num_kinds + kind
                if wishes.rank[wish] == part:
                    wishes.order[size] = wish
                    size += 1
            _set_part(wishes, 2 * at + part, start, size, kind)
    return 2 * num_kinds


@kernel
def _rank_by_share(
    jobs: Jobs, kind: int, num_kinds: int, largest_server: LongArray, wishes: Wishes
) -> None:
    for i in range(jobs.rows.shape[0]):
        wish, share = i * num_kinds + kind, jobs.shares[i, kind]
        spread = jobs.rows.gang[i] > largest_server[kind]
        speed = jobs.spread_steps_per_s[i, kind] if spread else jobs.steps_per_s[i, kind]
        keeps_off = jobs.rows.has_share[i] == _ONLY_SHARE and share <= 0.0
        if jobs.rows.phase[i] > _RUNNING or wishes.is_kept[i] or speed <= 0.0 or keeps_off:
            wishes.rank[wish] = _NO_WISH
            continue
        # Jobs that came since the last allocation stand behind all others.
        has_share = jobs.rows.has_share[i] != 0
        wishes.keys[0, wish] = share / max(jobs.received_s[i, kind], 1e-9) if has_share else -1.0
        wishes.keys[1, wish] = np.rint(jobs.credit_s[i, kind] * 1000.0)
        wishes.keys[2, wish] = share
        wishes.rank[wish] = _OWED if wishes.keys[0, wish] > 0.0 else _FILLING


@kernel
def _set_part(wishes: Wishes, part: int, start: int, stop: int, kind: int) -> None:
    wishes.parts[part, 0] = start
    wishes.parts[part, 1] = stop
    wishes.parts[part, 2] = kind


@kernel
def order_by_debt(
    jobs: Jobs,
    time_s: float,
    pace: Pace,
    stoppable: LongArray,
    largest_server: LongArray,
    wishes: Wishes,
) -> int:
    """All that jobs and pairs want, the largest deficit first; of equals, what would be lost most.

    Returns the number of parts: what somebody has a deficit for, then what only fills devices.
    """
    if not pace.keeps_running:
        _limit_debts(jobs, pace.max_deficit_s)
    _rank_by_debt(jobs, time_s, pace, stoppable, largest_server, wishes)
    first_pair = jobs.rows.shape[0] * jobs.shares.shape[1]
    for pair in range(wishes.pairs.shape[0]):
        wishes.rank[first_pair + pair] = _OWED
    size = 0
    for part in range(2):
        start = size
        for wish in range(wishes.rank.shape[0]):
            if wishes.rank[wish] == part:
                wishes.order[size] = wish
                size += 1
        _set_part(wishes, part, start, size, -1)
    return 2


@kernel
def _limit_debts(jobs: Jobs, most_s: float) -> None:
    for i in range(jobs.rows.shape[0]):
        for j in range(jobs.credit_s.shape[1]):
            jobs.credit_s[i, j] = min(max(jobs.credit_s[i, j], -most_s), most_s)
        jobs.rows.pair_credit_s[i] = min(max(jobs.rows.pair_credit_s[i], -most_s), most_s)


@kernel
def _rank_by_debt(
    jobs: Jobs,
    time_s: float,
    pace: Pace,
    stoppable: LongArray,
    largest_server: LongArray,
    wishes: Wishes,
) -> None:
    """Rank and keys of the wishes of all jobs; numbers are handed on, because handing on tuples of
    arrays for every wish would take most of the time."""
    num_kinds = jobs.shares.shape[1]
    for i in range(jobs.rows.shape[0]):
        for j in range(num_kinds):
            wishes.rank[i * num_kinds + j] = _NO_WISH
        phase, gang = jobs.rows.phase[i], jobs.rows.gang[i]
        if phase > _RUNNING or wishes.is_kept[i] or jobs.rows.over_quota[i] > 0:
            continue
        here = jobs.rows.kind[i] if jobs.rows.partner[i] < 0 else -1
        best, slowest, is_reserved, fits_by_stops = 1e-300, np.inf, False, False
        for j in range(num_kinds):
            speeds = jobs.steps_per_s if gang <= largest_server[j] else jobs.spread_steps_per_s
            speed = speeds[i, j]
            best = max(best, speed)
            slowest = min(slowest, speed) if speed > 0.0 else slowest
            fits_by_stops = fits_by_stops or (speed > 0.0 and gang <= stoppable[j])
            # Kinds that are equally fast are one kind to a job: its deficit is for any of them.
            deficit_s = jobs.credit_s[i, j]
            for k in range(num_kinds):
                if k != j and (jobs.shares[i, k] > 0.0 or k == here):
                    speeds = (
                        jobs.steps_per_s if gang <= largest_server[k] else jobs.spread_steps_per_s
                    )
                    if speeds[i, k] == speed:
                        deficit_s += jobs.credit_s[i, k]
            wishes.keys[0, i * num_kinds + j] = deficit_s
            if has_large_deficit(deficit_s, jobs.shares[i, j], pace.patience_s):
                is_reserved = True
        waited_s = time_s - jobs.rows.waiting_since_s[i]
        waits_too_long = has_waited_too_long(
            gang,
            phase == _WAITING,
            waited_s,
            pace.reserve_after_s,
            fits_by_stops,
            jobs.rows.reserved_s[i] > 0.0,
        )
        wishes.is_reserved[i] = is_reserved or waits_too_long
        left = max(jobs.rows.total_steps[i] - jobs.rows.done_steps[i], 0.0)
        longest_s = jobs.rows.total_steps[i] / slowest
        restarts_s = jobs.rows.attempt[i] * pace.restart_s
        # A job that has long had the time that it said to need is not about to end.
        if is_overdue(jobs.rows.held_s[i], restarts_s, longest_s, pace.round_s):
            left = np.inf
        lost, cost = 0.0, 0.0
        if phase == _RUNNING and jobs.rows.rate[i] > 0.0:
            lost_s = (jobs.rows.done_steps[i] - jobs.rows.saved_steps[i]) / jobs.rows.rate[i]
            lost = np.floor(lost_s / pace.round_s * UNITS_PER_ROUND)
            cost = stop_cost_rounds(
                pace.restart_s, lost_s, jobs.rows.losses[i], pace.stickiness_rounds, pace.round_s
            )
        for j in range(num_kinds):
            speeds = jobs.steps_per_s if gang <= largest_server[j] else jobs.spread_steps_per_s
            wish, speed = i * num_kinds + j, speeds[i, j]
            if speed <= 0.0:
                continue
            if jobs.shares[i, j] > 0.0:
                credit_s = wishes.keys[0, wish]
                stays = pace.stickiness_rounds + cost if here == j else 0.0
                stays += jobs.rows.group_shift[i]
                urgency = urgency_of_deficit(
                    credit_s,
                    left,
                    speed,
                    stays,
                    pace.slack_rounds,
                    pace.round_s,
                    jobs.rows.priority[i],
                )
                if waits_too_long:
                    urgency = RESERVED_FIRST + waited_s / pace.round_s
                elif is_reserved:
                    urgency += RESERVED_FIRST
                    # Debts end at a limit, where a gang that fits beside nobody looks like all
                    # others: there, waiting counts. One device is free sooner or later.
                    is_at_limit = gang > 1 and credit_s >= pace.max_deficit_s
                    has_waited = waited_s >= pace.stickiness_rounds * pace.round_s
                    if is_at_limit and has_waited and phase == _WAITING:
                        urgency += RESERVED_FIRST
            elif jobs.rows.has_share[i] == _ONLY_SHARE:
                continue
            else:
                urgency = urgency_filling(speed, best, here == j)
            wishes.keys[0, wish] = urgency
            wishes.keys[1, wish] = lost if here == j else 0.0
            wishes.keys[2, wish] = 0.0
            wishes.rank[wish] = _FILLING if wishes.keys[0, wish] < 0.5 * FILLING_LAST else _OWED


@kernel
def sort_part(wishes: Wishes, start: int, stop: int) -> None:
    """Sort a part of the order, the largest keys first; equals stay as they stood."""
    order, other = wishes.order, wishes.scratch
    # First keys are carried along: looking them up for every comparison takes twice as long.
    key, other_key = wishes.carried[0], wishes.carried[1]
    for at in range(start, stop):
        key[at] = wishes.keys[0, order[at]]
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
                        takes_right = _goes_before(wishes.keys, order[right], order[left])
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
            wishes.order[at] = wishes.scratch[at]


@kernel
def _goes_before(keys: FloatArray, one: int, other: int) -> bool:
    """True if a wish comes before another that has the same first key."""
    for key in range(1, keys.shape[0]):
        if keys[key, one] != keys[key, other]:
            return bool(keys[key, one] > keys[key, other])
    return False
