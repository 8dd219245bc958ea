"""The loops of a step over all jobs and devices, compiled.

`count` brings work and debts up to a moment, `choose` walks a list of wishes in order, `place`
gives devices to those chosen: O(jobs), O(wishes), O(devices + starts x servers).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.compiled.jit import compiled, compiled_entry
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Changes, Choice, Floor

Counts = NDArray[np.int64]

_RUNNING, _PAUSED, _ENDED = 1, 2, 3


@compiled_entry("hocket.fleet.rounds.state", "hocket.fleet.rounds.tables")
def count(
    jobs: Jobs, time_s: float, earns: bool, pair_credit_s: FloatArray, pair_amount: FloatArray
) -> float:
    """Bring steps done, time held and debts up to a moment; returns the time since the last."""
    num_kinds = jobs.shares.shape[1]
    passed_s = 0.0
    for i in range(jobs.rows.shape[0]):
        since_s = time_s - jobs.rows.counted_s[i]
        if since_s <= 0.0 or jobs.rows.phase[i] == _ENDED:
            continue
        passed_s = max(passed_s, since_s)
        if jobs.rows.phase[i] == _RUNNING:
            _work(jobs, i, time_s, since_s, earns, pair_credit_s)
        if jobs.rows.phase[i] != _PAUSED:
            for j in range(num_kinds):
                jobs.rows.target_s[i] += jobs.shares[i, j] * since_s
                if earns:
                    jobs.credit_s[i, j] += jobs.shares[i, j] * since_s
            jobs.rows.target_s[i] += jobs.rows.pair_share[i] * since_s
            jobs.rows.pair_credit_s[i] += jobs.rows.pair_share[i] * since_s
        jobs.rows.counted_s[i] = time_s
    for a in range(pair_amount.shape[0]):
        for b in range(a, pair_amount.shape[1]):
            for j in range(num_kinds):
                pair_credit_s[a, b, j] += pair_amount[a, b, j] * passed_s
    return passed_s


@compiled
def _work(
    jobs: Jobs,
    i: int,
    time_s: float,
    since_s: float,
    earns: bool,
    pair_credit_s: FloatArray,
) -> None:
    kind = jobs.rows.kind[i]
    jobs.rows.held_s[i] += since_s
    jobs.received_s[i, kind] += since_s
    if jobs.rows.partner[i] >= 0:
        jobs.rows.pair_credit_s[i] -= since_s
        low, high = jobs.rows.profile[i], -1
        if jobs.rows.number[i] < jobs.rows.partner[i]:
            for other in range(i + 1, jobs.rows.shape[0]):
                if jobs.rows.number[other] == jobs.rows.partner[i]:
                    high = jobs.rows.profile[other]
                    break
            if high >= 0:
                pair_credit_s[min(low, high), max(low, high), kind] -= since_s
    elif earns:
        jobs.credit_s[i, kind] -= since_s
    worked_s = time_s - max(jobs.rows.ready_s[i], time_s - since_s)
    if worked_s > 0.0:
        done = jobs.rows.done_steps[i] + jobs.rows.rate[i] * worked_s
        jobs.rows.done_steps[i] = min(done, jobs.rows.total_steps[i])


@compiled_entry("hocket.fleet.rounds.state", "hocket.fleet.rounds.tables")
def first_to_finish(jobs: Jobs) -> tuple[float, int]:
    """When the next running job does its last step at its rate, and its row; infinite for none."""
    first_s, row = np.inf, -1
    for i in range(jobs.rows.shape[0]):
        if jobs.rows.phase[i] == _RUNNING and jobs.rows.rate[i] > 0.0:
            left = jobs.rows.total_steps[i] - jobs.rows.done_steps[i]
            end_s = max(jobs.rows.counted_s[i], jobs.rows.ready_s[i]) + left / jobs.rows.rate[i]
            if end_s < first_s:
                first_s, row = end_s, i
    return first_s, row


# ── who runs ─────────────────────────────────────────────────────────────────────────────────────


@compiled_entry("hocket.fleet.rounds.state", "hocket.fleet.rounds.tables")
def choose(
    jobs: Jobs,
    wishes: Counts,
    is_reserved: NDArray[np.bool_],
    pairs: Counts,
    queue: Counts,
    queue_at: Counts,
    free: Counts,
    choice: Choice,
) -> None:
    """Walk wishes in order and grant what fits.

    A wish below ``jobs x kinds`` is a job on a kind; the others are rows of ``pairs`` (profile,
    profile, kind) and go to the first jobs of both profiles in ``queue`` that are still free. A
    reserved job that does not fit keeps what is left of the kind from those after it.
    """
    num_kinds = free.shape[0]
    num_single = jobs.rows.shape[0] * num_kinds
    for at in range(wishes.shape[0]):
        wish = wishes[at]
        if wish >= num_single:
            _grant_pair(jobs, pairs[wish - num_single], queue, queue_at, free, choice)
            continue
        job, kind = wish // num_kinds, wish % num_kinds
        if choice.kind[job] >= 0 or jobs.steps_per_s[job, kind] <= 0.0:
            continue
        if jobs.rows.gang[job] <= free[kind]:
            choice.kind[job] = kind
            free[kind] -= jobs.rows.gang[job]
        elif is_reserved[job]:
            free[kind] = 0


@compiled
def _grant_pair(
    jobs: Jobs, pair: Counts, queue: Counts, queue_at: Counts, free: Counts, choice: Choice
) -> None:
    a, b, kind = pair[0], pair[1], pair[2]
    one = _next_of(a, -1, queue, queue_at, choice)
    other = _next_of(b, one, queue, queue_at, choice)
    if one < 0 or other < 0 or jobs.rows.gang[one] > free[kind]:
        return
    choice.kind[one] = kind
    choice.kind[other] = kind
    choice.partner[one] = other
    choice.partner[other] = one
    free[kind] -= jobs.rows.gang[one]


@compiled
def _next_of(profile: int, but: int, queue: Counts, queue_at: Counts, choice: Choice) -> int:
    """The first job of a profile that has nothing yet; ``queue_at`` moves past those that have."""
    at, end = queue_at[profile, 0], queue_at[profile, 1]
    while at < end and choice.kind[queue[at]] >= 0:
        at += 1
    queue_at[profile, 0] = at
    while at < end and (choice.kind[queue[at]] >= 0 or queue[at] == but):
        at += 1
    return queue[at] if at < end else -1


# ── on which devices ─────────────────────────────────────────────────────────────────────────────


@compiled_entry("hocket.fleet.rounds.state", "hocket.fleet.rounds.tables")
def place(
    jobs: Jobs,
    choice: Choice,
    old_partner: Counts,
    by_gang: Counts,
    floor: Floor,
    changes: Changes,
) -> None:
    """Keep jobs where they are if they may stay on the kind, then fill servers tightly."""
    for i in range(choice.kind.shape[0]):
        changes.stays[i] = jobs.rows.phase[i] == _RUNNING and choice.kind[i] == jobs.rows.kind[i]
    for i in range(choice.kind.shape[0]):
        _part(i, old_partner[i], choice.partner[i], choice, changes)
    _release(floor, changes)
    for at in range(by_gang.shape[0]):
        i = by_gang[at]
        if choice.kind[i] < 0 or changes.stays[i]:
            continue
        partner = choice.partner[i]
        if partner >= 0 and _holds(partner, floor):
            _join(i, partner, floor, changes)
        else:
            _take(i, choice.kind[i], jobs.rows.gang[i], floor, changes)


@compiled
def _part(i: int, old: int, new: int, choice: Choice, changes: Changes) -> None:
    """Of two jobs that would both stay but may not both, the later one moves."""
    if not changes.stays[i]:
        return
    if old >= 0 and old != new and old < i and changes.stays[old]:
        changes.stays[i] = False
    if new >= 0 and old != new and new < i and changes.stays[new]:
        changes.stays[i] = False


@compiled
def _release(floor: Floor, changes: Changes) -> None:
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


@compiled
def _holds(row: int, floor: Floor) -> bool:
    for device in range(floor.holders.shape[0]):
        if floor.holders[device, 0] == row or floor.holders[device, 1] == row:
            return True
    return False


@compiled
def _join(i: int, partner: int, floor: Floor, changes: Changes) -> None:
    size = changes.size[1]
    for device in range(floor.holders.shape[0]):
        if floor.holders[device, 0] == partner:
            floor.holders[device, 1] = i
            changes.device[size] = device
            size += 1
    _note(i, size, changes)


@compiled
def _note(i: int, size: int, changes: Changes) -> None:
    at = changes.size[0]
    changes.started[at] = i
    changes.device_ptr[at + 1] = size
    changes.size[0] = at + 1
    changes.size[1] = size


@compiled
def _take(i: int, kind: int, gang: int, floor: Floor, changes: Changes) -> None:
    """The fullest server with room for all, else the emptiest servers one after another."""
    size, need = changes.size[1], gang
    while need > 0:
        best = -1
        for server in range(floor.num_free.shape[0]):
            room = floor.num_free[server]
            if floor.server_kind[server] != kind or room == 0:
                continue
            if best < 0:
                best = server
            elif room >= need:
                if floor.num_free[best] < need or room < floor.num_free[best]:
                    best = server
            elif floor.num_free[best] < room:
                best = server
        if best < 0:
            break
        for at in range(floor.server_ptr[best], floor.server_ptr[best + 1]):
            device = floor.order[at]
            if need > 0 and floor.holders[device, 0] < 0:
                floor.holders[device, 0] = i
                floor.num_free[best] -= 1
                changes.device[size] = device
                size += 1
                need -= 1
    _note(i, size, changes)
