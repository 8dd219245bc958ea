"""Walk wishes in order and grant what fits. O(wishes + pairs x jobs that share)."""

from __future__ import annotations

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.kernels.order import sort_part
from hocket.fleet.rounds.kernels.rates import speed_on
from hocket.fleet.rounds.kernels.reserve import may_backfill, start_or_reserve
from hocket.fleet.rounds.kernels.timeline import Timeline
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Floor, Pace, RoundChoice, Wishes
from hocket.kernels import kernel


@kernel
def choose(
    time_s: float,
    jobs: Jobs,
    num_parts: int,
    pace: Pace,
    largest_server: LongArray,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    timeline: Timeline,
) -> None:
    """Who runs where, part by part as long as devices are left.

    A wish below ``jobs x kinds`` is a job on a kind; the others are rows of ``pairs`` (profile,
    profile, kind) and go to the first jobs of both profiles in ``queue`` that are still free.
    Reserved jobs come first; before their time, others get what they give back in time.
    """
    for part in range(num_parts):
        start, stop, kind = wishes.parts[part, 0], wishes.parts[part, 1], wishes.parts[part, 2]
        num_free = 0
        for other in range(choice.free.shape[0]):
            if kind < 0 or other == kind:
                num_free += choice.free[other]
        # Without anything free, reserved jobs are to be told when they may start.
        if num_free > 0 or timeline.size[choice.free.shape[0]] > 0:
            sort_part(wishes, start, stop)
            _grant(time_s, jobs, start, stop, pace, largest_server, wishes, choice, floor, timeline)


@kernel
def stay(jobs: Jobs, largest_server: LongArray, choice: RoundChoice) -> bool:
    """Take back moves by which nobody gains; returns whether there were any.

    A job alone that was given another kind, on which it is no faster, stays where it is if nobody
    else was given its devices.
    """
    is_changed = False
    for i in range(jobs.rows.shape[0]):
        before, kind = choice.before[i], choice.kind[i]
        if before < 0 or kind < 0 or kind == before:
            continue
        is_alone = jobs.rows.partner[i] < 0 and choice.partner[i] < 0
        # It may be spread over servers there, or have been taken for faster when it began.
        present = min(jobs.rows.rate[i], speed_on(jobs, i, before, largest_server))
        gains = speed_on(jobs, i, kind, largest_server) > present
        if is_alone and not gains and jobs.rows.gang[i] <= choice.free[before]:
            choice.free[kind] += jobs.rows.gang[i]
            choice.free[before] -= jobs.rows.gang[i]
            choice.kind[i] = before
            is_changed = True
    return is_changed


@kernel
def _grant(
    time_s: float,
    jobs: Jobs,
    start: int,
    stop: int,
    pace: Pace,
    largest_server: LongArray,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    timeline: Timeline,
) -> None:
    num_kinds = choice.free.shape[0]
    has_reserved = timeline.size[num_kinds] > 0
    num_single = jobs.rows.shape[0] * num_kinds
    for at in range(start, stop):
        wish = wishes.order[at]
        if wish >= num_single:
            if not wishes.is_withdrawn[wish]:
                _grant_pair(jobs, wish - num_single, wishes, choice)
            continue
        job, kind = wish // num_kinds, wish % num_kinds
        if choice.kind[job] >= 0 or jobs.rows.reserved_s[job] > 0.0:
            continue
        if wishes.is_reserved[job] and has_reserved:
            start_or_reserve(
                time_s, jobs, job, kind, pace, largest_server, wishes, choice, floor, timeline
            )
            continue
        fits = jobs.rows.gang[job] <= choice.free[kind] and not wishes.is_withdrawn[wish]
        if fits and has_reserved:
            fits = may_backfill(time_s, jobs, job, kind, pace, largest_server, choice, timeline)
        if fits:
            choice.kind[job] = kind
            choice.free[kind] -= jobs.rows.gang[job]
        elif wishes.is_reserved[job] and not wishes.is_withdrawn[wish]:
            # It gets what it needs at the next round; nobody starts on it for so short.
            choice.free[kind] = 0


@kernel
def _grant_pair(jobs: Jobs, at: int, wishes: Wishes, choice: RoundChoice) -> None:
    a, b, kind = wishes.pairs[at, 0], wishes.pairs[at, 1], wishes.pairs[at, 2]
    one = _next_of(a, -1, wishes, choice)
    other = _next_of(b, one, wishes, choice)
    if one < 0 or other < 0 or jobs.rows.gang[one] > choice.free[kind]:
        return
    choice.kind[one] = kind
    choice.kind[other] = kind
    choice.partner[one] = other
    choice.partner[other] = one
    choice.free[kind] -= jobs.rows.gang[one]


@kernel
def _next_of(profile: int, but: int, wishes: Wishes, choice: RoundChoice) -> int:
    """The first job of a profile that has nothing yet; ``queue_at`` moves past those that have."""
    at, end = wishes.queue_at[profile, 0], wishes.queue_at[profile, 1]
    while at < end and choice.kind[wishes.queue[at]] >= 0:
        at += 1
    wishes.queue_at[profile, 0] = at
    while at < end and (choice.kind[wishes.queue[at]] >= 0 or wishes.queue[at] == but):
        at += 1
    return wishes.queue[at] if at < end else -1
