"""Wishes and their urgency, in parts that are sorted when their turn comes.

Devices are mostly gone before those are asked who are owed nothing, so that these need no sorting.
A stable merge sort by several keys: O(wishes log wishes).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.compiled.jit import compiled, compiled_entry
from hocket.fleet.rounds.kernels.rates import speed_on
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import HALF_ROUNDS, UNITS_PER_ROUND, Pace, Wishes

Counts = NDArray[np.int64]

_WAITING, _RUNNING = 0, 1
_OWED, _FILLING, _NO_WISH = 0, 1, 2
_FIRST = 1e6
"""Rounds by which reserved jobs go before others, and protected ones before those."""
_LAST = -1e6
"""Rounds by which wishes that nobody owes come after all debts."""


@compiled_entry(
    "hocket.fleet.rounds.state",
    "hocket.fleet.rounds.tables",
    "hocket.fleet.rounds.kernels.rates",
)
def order_by_share(jobs: Jobs, kinds: Counts, largest_server: Counts, wishes: Wishes) -> int:
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


@compiled
def _rank_by_share(
    jobs: Jobs, kind: int, num_kinds: int, largest_server: Counts, wishes: Wishes
) -> None:
    for i in range(jobs.rows.shape[0]):
        wish, share = i * num_kinds + kind, jobs.shares[i, kind]
        wishes.keys[0, wish] = share / max(jobs.received_s[i, kind], 1e-9)
        if jobs.rows.has_share[i] == 0:
            # Jobs that came since the last allocation stand behind all others.
            wishes.keys[0, wish] = -1.0
        wishes.keys[1, wish] = np.rint(jobs.credit_s[i, kind] * 1000.0)
        wishes.keys[2, wish] = share
        wishes.rank[wish] = _OWED if wishes.keys[0, wish] > 0.0 else _FILLING
        if jobs.rows.phase[i] > _RUNNING or speed_on(jobs, i, kind, largest_server) <= 0.0:
            wishes.rank[wish] = _NO_WISH


@compiled
def _set_part(wishes: Wishes, part: int, start: int, stop: int, kind: int) -> None:
    wishes.parts[part, 0] = start
    wishes.parts[part, 1] = stop
    wishes.parts[part, 2] = kind


@compiled_entry(
    "hocket.fleet.rounds.state",
    "hocket.fleet.rounds.tables",
    "hocket.fleet.rounds.kernels.rates",
)
def order_by_debt(
    jobs: Jobs, time_s: float, pace: Pace, largest_server: Counts, wishes: Wishes
) -> int:
    """All that jobs and pairs want, what is owed most first; of equals, what would be lost most.

    Returns the number of parts: what somebody is owed, then what only fills devices.
    """
    num_kinds = jobs.shares.shape[1]
    first_pair = jobs.rows.shape[0] * num_kinds
    for i in range(jobs.rows.shape[0]):
        phase = jobs.rows.phase[i]
        is_asked = phase == _WAITING or (phase == _RUNNING and not pace.only_waiting)
        if not pace.only_waiting:
            _limit_debts(jobs, i, pace.most_owed_s)
        _rank_by_debt(jobs, i, is_asked, time_s, pace, largest_server, wishes)
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


@compiled
def _limit_debts(jobs: Jobs, i: int, most_s: float) -> None:
    for j in range(jobs.credit_s.shape[1]):
        jobs.credit_s[i, j] = min(max(jobs.credit_s[i, j], -most_s), most_s)
    jobs.rows.pair_credit_s[i] = min(max(jobs.rows.pair_credit_s[i], -most_s), most_s)


@compiled
def _rank_by_debt(
    jobs: Jobs,
    i: int,
    is_asked: bool,
    time_s: float,
    pace: Pace,
    largest_server: Counts,
    wishes: Wishes,
) -> None:
    num_kinds, best = jobs.shares.shape[1], 1e-300
    for j in range(num_kinds):
        wishes.rank[i * num_kinds + j] = _NO_WISH
        best = max(best, speed_on(jobs, i, j, largest_server))
        if jobs.credit_s[i, j] > pace.patience_s and jobs.shares[i, j] > 0.0:
            wishes.is_reserved[i] = is_asked
    for j in range(num_kinds):
        speed = speed_on(jobs, i, j, largest_server)
        if is_asked and speed > 0.0:
            wish = i * num_kinds + j
            _weigh(jobs, i, j, speed, speed / best, time_s, pace, wishes)
            is_filling = wishes.keys[0, wish] < 0.5 * _LAST
            wishes.rank[wish] = _FILLING if is_filling else _OWED


@compiled
def _weigh(
    jobs: Jobs,
    i: int,
    j: int,
    speed: float,
    relative_speed: float,
    time_s: float,
    pace: Pace,
    wishes: Wishes,
) -> None:
    """Rounds that a job is owed on a kind, and what goes before or after all debts."""
    is_here = jobs.rows.kind[i] == j and jobs.rows.partner[i] < 0
    wish = i * jobs.shares.shape[1] + j
    if jobs.shares[i, j] > 0.0:
        owed = jobs.credit_s[i, j] / pace.round_s
        if is_here:
            owed += pace.stickiness_rounds
        left = max(jobs.rows.total_steps[i] - jobs.rows.done_steps[i], 0.0)
        rounds_left = left / (speed * pace.round_s)
        owed += pace.slack_rounds * HALF_ROUNDS / (HALF_ROUNDS + rounds_left)
        urgency = np.floor(owed * UNITS_PER_ROUND) / UNITS_PER_ROUND
        if wishes.is_reserved[i]:
            urgency += _FIRST
            # Debts end at a limit, where a gang that fits beside nobody looks like all others:
            # there, waiting counts. One device is free sooner or later.
            is_at_limit = jobs.rows.gang[i] > 1 and jobs.credit_s[i, j] >= pace.most_owed_s
            waited_s = time_s - jobs.rows.waiting_since_s[i]
            has_waited = waited_s >= pace.stickiness_rounds * pace.round_s
            if is_at_limit and has_waited and jobs.rows.phase[i] == _WAITING:
                urgency += _FIRST
    else:
        urgency = _LAST + np.rint(relative_speed * 1e6) / 1e6 + (0.5 if is_here else 0.0)
    lost = 0.0
    if is_here and jobs.rows.phase[i] == _RUNNING:
        if time_s - jobs.rows.started_s[i] < pace.min_run_s:
            urgency += 4.0 * _FIRST
        if jobs.rows.rate[i] > 0.0:
            lost_s = (jobs.rows.done_steps[i] - jobs.rows.saved_steps[i]) / jobs.rows.rate[i]
            lost = np.floor(lost_s / pace.round_s * UNITS_PER_ROUND)
    wishes.keys[0, wish] = urgency
    wishes.keys[1, wish] = lost
    wishes.keys[2, wish] = 0.0


@compiled
def sort_part(wishes: Wishes, start: int, stop: int) -> None:
    """Sort a part of the order, the largest keys first; equals stay as they stood."""
    width, is_swapped = 1, False
    order, other = wishes.order, wishes.scratch
    while width < stop - start:
        low = start
        while low < stop:
            middle, high = min(low + width, stop), min(low + 2 * width, stop)
            _merge(order, other, low, middle, high, wishes.keys)
            low = high
        order, other = other, order
        width, is_swapped = width * 2, not is_swapped
    if is_swapped:
        for at in range(start, stop):
            wishes.order[at] = wishes.scratch[at]


@compiled
def _merge(
    order: Counts, merged: Counts, low: int, middle: int, high: int, keys: FloatArray
) -> None:
    left, right = low, middle
    for at in range(low, high):
        takes_right = left >= middle
        if left < middle and right < high:
            takes_right = _goes_before(keys, order[right], order[left])
        if takes_right:
            merged[at] = order[right]
            right += 1
        else:
            merged[at] = order[left]
            left += 1


@compiled
def _goes_before(keys: FloatArray, one: int, other: int) -> bool:
    for key in range(keys.shape[0]):
        if keys[key, one] != keys[key, other]:
            return bool(keys[key, one] > keys[key, other])
    return False
