"""A whole round, or what is given out between two: wishes, grants, devices, as one call.

O(devices + starts x servers) beside sorting.
"""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds.actions import MOVED, PREEMPTED
from hocket.fleet.rounds.kernels.grant import (
    fill_in_line,
    grant_wishes,
    predict_free_devices,
    take_back_moves,
)
from hocket.fleet.rounds.kernels.rates import row_of, set_rate
from hocket.fleet.rounds.kernels.wishes import order_wishes
from hocket.fleet.rounds.state import NOT_SOLVED, RUNNING, WAITING
from hocket.fleet.rounds.tables import Round
from hocket.kernels import kernel

_MAX_TRIES = 8
"""Attempts at a round; each withdraws the wishes of gangs that fit on no server."""


@kernel
def run_round(r: Round) -> None:
    """Run a round; ``jobs`` and ``holders`` then state which job holds which device."""
    num_parts = order_wishes(r)
    # Each failed try withdraws at least one wish; the last leaves devices idle.
    for tries_left in range(_MAX_TRIES - 1, -1, -1):
        _reset_grants(r)
        if try_round(r, num_parts, tries_left == 0):
            break


@kernel
def _reset_grants(r: Round) -> None:
    """Reset all grants: every job still holds its devices from before the round."""
    for device_type in range(r.free.shape[0]):
        r.free[device_type] = r.layout.num_devices[device_type]
        r.first[device_type] = 0
    for column in range(2):
        for profile in range(r.queue_at.shape[0]):
            r.queue_at[profile, column] = r.asked.queue_at[profile, column]
        for device in range(r.holders.shape[0]):
            r.holders[device, column] = r.held[device, column]
    # Reservations are computed again in each try.
    r.server_needed_s[:] = np.inf
    r.is_placed[:] = False
    r.sizes[:] = 0


@kernel
def try_round(r: Round, num_parts: int, is_final: bool) -> bool:
    """Grant wishes in order, place the granted jobs on devices, and record stops and starts.

    Returns False, without a change of ``jobs`` but for ``reserved_s``, if a gang was granted
    devices but fits on no server. Its wish is then withdrawn, so that others may have the devices.
    With ``is_final`` they stay idle.
    """
    rows = r.jobs.rows
    for i in range(rows.shape[0]):
        r.before[i] = rows.device_type[i] if rows.phase[i] == RUNNING else -1
        r.device_type[i] = r.before[i] if r.is_kept[i] else -1
        r.partner[i] = -1
        r.ends_s[i] = -np.inf
        rows.reserved_s[i] = 0.0
        if r.device_type[i] >= 0 and rows.partner[i] >= 0:
            r.partner[i] = row_of(r.jobs, rows.partner[i])
    _subtract_devices_of_kept_jobs(r)
    predict_free_devices(r)
    if r.parameters.backfills:
        fill_in_line(r)
        num_parts = 0
    grant_wishes(r, num_parts)
    if r.parameters.keeps_equal and not r.parameters.by_share:
        is_changed = take_back_moves(r)
        # Other jobs may want the devices that became free. Not with pairs: they would be granted
        # twice.
        if is_changed and r.asked.pairs.shape[0] == 0:
            grant_wishes(r, num_parts)
    if r.parameters.by_share:
        for i in range(rows.shape[0]):
            if rows.has_share[i] == NOT_SOLVED and not r.is_kept[i]:
                r.device_type[i] = -1
    _mark_staying(r)
    _release(r)
    if not _place_all(r) and not is_final:
        return False
    _write_stops(r)
    _write_starts(r)
    _set_rates(r)
    _write_numbers(r)
    return True


@kernel
def _set_rates(r: Round) -> None:
    """Set partners and rates of all jobs; a job that stays alone keeps its rate."""
    rows = r.jobs.rows
    for i in range(rows.shape[0]):
        partner = r.partner[i]
        if r.stays[i] and partner < 0 and rows.partner[i] < 0:
            continue
        number = rows.number[partner] if partner >= 0 else -1
        if rows.partner[i] != number and r.stays[i]:
            # Steps since the last report were not all done beside this partner, so they are not
            # used as a measurement.
            rows.measured_s[i] = np.inf
        rows.partner[i] = number
        if r.device_type[i] >= 0:
            set_rate(r.jobs, i, partner, r.speeds)


@kernel
def _subtract_devices_of_kept_jobs(r: Round) -> None:
    for server in range(r.num_free.shape[0]):
        for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
            row = r.holders[r.layout.order[at], 0]
            if row >= 0 and r.is_kept[row]:
                r.free[r.layout.server_type[server]] -= 1


@kernel
def _mark_staying(r: Round) -> None:
    """Mark the jobs that keep their devices: same device type as before, and a compatible
    partner."""
    rows = r.jobs.rows
    has_pairs = False
    for i in range(r.device_type.shape[0]):
        r.stays[i] = r.before[i] >= 0 and r.device_type[i] == r.before[i]
        r.is_spread[i] = rows.is_spread[i]
        has_pairs = has_pairs or r.partner[i] >= 0 or rows.partner[i] >= 0
    if not has_pairs:
        return
    for i in range(r.device_type.shape[0]):
        if not r.stays[i]:
            continue
        old, new = row_of(r.jobs, rows.partner[i]), r.partner[i]
        if old == new:
            continue
        # Of two jobs that would both stay but may not both, the later one moves.
        parts = 0 <= old < i and r.stays[old]
        joins = 0 <= new < i and r.stays[new]
        is_apart = r.is_spread[i] and not _can_spread(r, i)
        r.stays[i] = not (parts or joins or is_apart)


@kernel
def _release(r: Round) -> None:
    for device in range(r.holders.shape[0]):
        for slot in range(2):
            row = r.holders[device, slot]
            if row >= 0 and not r.stays[row]:
                r.holders[device, slot] = -1
        if r.holders[device, 0] < 0:
            r.holders[device, 0] = r.holders[device, 1]
            r.holders[device, 1] = -1
    for server in range(r.num_free.shape[0]):
        r.num_free[server] = 0
        for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
            r.num_free[server] += r.holders[r.layout.order[at], 0] < 0


@kernel
def _place_all(r: Round) -> bool:
    """Place granted jobs, large gangs first, so that they find whole servers; smaller jobs may
    move.

    Reserved gangs that need one server come before all others. Returns True if all granted jobs
    were placed.
    """
    rows = r.jobs.rows
    is_done, gang = _place_reserved(r), 0
    for i in range(rows.shape[0]):
        if r.device_type[i] >= 0 and not r.stays[i] and not r.is_placed[i]:
            gang = max(gang, rows.gang[i])
    while gang > 0:
        smaller = 0
        for i in range(rows.shape[0]):
            if r.device_type[i] < 0 or r.stays[i] or r.is_placed[i]:
                continue
            if rows.gang[i] < gang:
                smaller = max(smaller, rows.gang[i])
                continue
            device_type, partner = r.device_type[i], r.partner[i]
            if not r.parameters.is_refill and not _can_spread(r, i):
                vacate_server(r, device_type, gang, r.time_s, False)
            if _place_one(r, i):
                continue
            # A job that goes first keeps its wish, and devices idle for it until the next round. It
            # withdraws, and gets a reservation, where jobs that must not be stopped are in the way.
            if partner >= 0 or not r.goes_first[i] or r.parameters.reserve_after_s < np.inf:
                _withdraw(r, i, partner, device_type)
                is_done = False
        # Evicted jobs are smaller than the gang, so they come later.
        for i in range(rows.shape[0]):
            if r.device_type[i] >= 0 and not r.stays[i] and rows.gang[i] < gang:
                smaller = max(smaller, rows.gang[i])
        gang = smaller
    return is_done


@kernel
def _withdraw(r: Round, i: int, partner: int, device_type: int) -> None:
    """Withdraw the wish of a job, or the wishes of all pairs with the same profiles."""
    rows = r.jobs.rows
    num_types = r.jobs.shares.shape[1]
    if partner < 0:
        r.is_withdrawn[i * num_types + device_type] = True
        return
    first_pair = rows.shape[0] * num_types
    one, two = rows.profile[i], rows.profile[partner]
    for pair in range(r.asked.pairs.shape[0]):
        is_alike = r.asked.pairs[pair, 0] == min(one, two) and r.asked.pairs[pair, 1] == max(
            one, two
        )
        if is_alike and r.asked.pairs[pair, 2] == device_type:
            r.is_withdrawn[first_pair + pair] = True


@kernel
def _place_reserved(r: Round) -> bool:
    """Place reserved gangs that need one server; False if one withdrew because none has room."""
    rows, is_done = r.jobs.rows, True
    num_types = r.free.shape[0]
    num_single = rows.shape[0] * num_types
    for at in range(r.parts[0, 0], r.parts[0, 1]):
        wish = r.order[at]
        i, device_type = wish // num_types, wish % num_types
        if r.parameters.is_refill or wish >= num_single or not r.goes_first[i]:
            continue
        needs_one_server = r.jobs.spread_steps_per_s[i, device_type] <= 0.0 and r.partner[i] < 0
        if needs_one_server and r.device_type[i] == device_type and not r.stays[i]:
            need = rows.gang[i]
            vacate_server(r, device_type, need, r.time_s, False)
            vacate_server(r, device_type, need, r.time_s - r.parameters.min_turn_s, True)
            if not _place_one(r, i) and r.parameters.reserve_after_s < np.inf:
                # Jobs that must not be stopped are on every server: it gets a reservation instead.
                _withdraw(r, i, -1, device_type)
                is_done = False
    return is_done


@kernel
def _place_one(r: Round, i: int) -> bool:
    """Place a job on devices; False if it needs one server and fits on none."""
    rows = r.jobs.rows
    partner, device_type, need = r.partner[i], r.device_type[i], rows.gang[i]
    joins = partner >= 0 and (r.stays[partner] or r.is_placed[partner])
    ends_s = r.ends_s[i]
    best = -1 if joins else _best_server(r, device_type, need, ends_s)
    is_spread = best < 0 or r.num_free[best] < need
    if joins:
        is_spread = r.is_spread[partner]
    is_enough = joins or not is_spread or _free_on(r, device_type, ends_s) >= need
    if not is_enough or (is_spread and not _can_spread(r, i)):
        r.device_type[i] = -1
        r.partner[i] = -1
        if partner >= 0:
            r.partner[partner] = -1
        return False
    r.is_spread[i] = is_spread
    if joins:
        _join(r, i, partner)
    else:
        _take(r, i, device_type, need, best, ends_s)
    at = r.sizes[1]
    r.started[0, at] = i
    r.device_ptr[at + 1] = r.sizes[2]
    r.sizes[1] = at + 1
    r.is_placed[i] = True
    return True


@kernel
def _can_spread(r: Round, i: int) -> bool:
    """True if a job and its partner, if any, can run across several servers."""
    device_type, partner = r.device_type[i], r.partner[i]
    is_able: bool = r.jobs.spread_steps_per_s[i, device_type] > 0.0
    return is_able and (partner < 0 or r.jobs.spread_steps_per_s[partner, device_type] > 0.0)


@kernel
def _join(r: Round, i: int, partner: int) -> None:
    """Place a job on its partner's devices."""
    size = r.sizes[2]
    for device in range(r.holders.shape[0]):
        if r.holders[device, 0] == partner:
            r.holders[device, 1] = i
            r.device[size] = device
            size += 1
    r.sizes[2] = size


@kernel
def _free_on(r: Round, device_type: int, ends_s: float) -> int:
    """Free devices of a type on servers that are not reserved before ``ends_s``."""
    num_free = 0
    for server in range(r.num_free.shape[0]):
        if r.layout.server_type[server] == device_type and ends_s <= r.server_needed_s[server]:
            num_free += r.num_free[server]
    return num_free


@kernel
def _best_server(r: Round, device_type: int, need: int, ends_s: float) -> int:
    """The fullest server on which the job fits, else the one with most free devices; -1 if all are
    full.

    Servers that a reserved gang needs before the job ends count as full.
    """
    best, num_servers = -1, r.num_free.shape[0]
    first = r.first[device_type]
    while first < num_servers and (
        r.layout.server_type[first] != device_type or r.num_free[first] == 0
    ):
        first += 1
    r.first[device_type] = first
    for server in range(first, num_servers):
        num_free = r.num_free[server]
        if (
            r.layout.server_type[server] != device_type
            or num_free == 0
            or ends_s > r.server_needed_s[server]
        ):
            continue
        if num_free == need:
            return server
        if best < 0:
            best = server
        elif num_free >= need:
            if r.num_free[best] < need or num_free < r.num_free[best]:
                best = server
        elif r.num_free[best] < num_free:
            best = server
    return best


@kernel
def _take(r: Round, i: int, device_type: int, need: int, best: int, ends_s: float) -> None:
    while need > 0 and best >= 0:
        for at in range(r.layout.server_ptr[best], r.layout.server_ptr[best + 1]):
            device = r.layout.order[at]
            if need > 0 and r.holders[device, 0] < 0:
                r.holders[device, 0] = i
                r.num_free[best] -= 1
                r.device[r.sizes[2]] = device
                r.sizes[2] += 1
                need -= 1
        if need > 0:
            best = _best_server(r, device_type, need, ends_s)


@kernel
def _write_stops(r: Round) -> None:
    rows = r.jobs.rows
    size = 0
    for i in range(rows.shape[0]):
        if r.before[i] < 0:
            continue
        saves = rows.preemptible[i] > 0 and rows.losses[i] == 0
        if saves and (not r.parameters.is_refill or not r.stays[i]):
            # The job saves at each round and each stop, so it loses less than a round of work.
            rows.saved_steps[i] = rows.done_steps[i]
        if r.stays[i]:
            continue
        rows.done_steps[i] = rows.saved_steps[i]
        r.stopped[0, size] = rows.number[i]
        r.stopped[1, size] = rows.attempt[i]
        r.stopped[2, size] = MOVED if r.device_type[i] >= 0 else PREEMPTED
        rows.phase[i] = WAITING
        rows.device_type[i] = -1
        rows.waiting_since_s[i] = r.time_s
        size += 1
    r.sizes[0] = size


@kernel
def _write_starts(r: Round) -> None:
    rows = r.jobs.rows
    for at in range(r.sizes[1]):
        i = r.started[0, at]
        rows.phase[i] = RUNNING
        rows.device_type[i] = r.device_type[i]
        rows.attempt[i] += 1
        rows.is_spread[i] = r.is_spread[i]
        rows.started_s[i] = r.time_s
        rows.ready_s[i] = r.time_s + r.parameters.restart_s
        rows.measured_s[i] = r.time_s + r.parameters.restart_s
        rows.measured_steps[i] = rows.done_steps[i]


@kernel
def _write_numbers(r: Round) -> None:
    """Replace rows of jobs by their numbers in the results."""
    rows = r.jobs.rows
    for at in range(r.sizes[1]):
        i = r.started[0, at]
        r.started[0, at] = rows.number[i]
        r.started[1, at] = rows.attempt[i]
        r.started[2, at] = rows.partner[i]
    for device in range(r.holders.shape[0]):
        for slot in range(2):
            if r.holders[device, slot] >= 0:
                r.holders[device, slot] = rows.number[r.holders[device, slot]]


# ── capacity on one server ───────────────────────────────────────────────────────────────────────


@kernel
def vacate_server(
    r: Round, device_type: int, need: int, started_by_s: float, of_any_size: bool
) -> None:
    """If a gang fits on no server, evict jobs from the emptiest server that can be cleared.

    Jobs can be evicted if they are not kept, have run since ``started_by_s`` at the latest, and are
    smaller than the gang (or of any size, with ``of_any_size``). They are placed anew, or stopped
    if no device is left.
    """
    best, most_free = -1, -1
    for server in range(r.num_free.shape[0]):
        if r.layout.server_type[server] != device_type:
            continue
        if r.num_free[server] >= need:
            return
        num_free = 0
        for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
            row = r.holders[r.layout.order[at], 0]
            is_leaving = row >= 0 and _can_leave(r, row, need, started_by_s, of_any_size)
            num_free += row < 0 or is_leaving
        if num_free >= need and r.num_free[server] > most_free:
            best, most_free = server, r.num_free[server]
    if best >= 0:
        _evict_from_server(r, best, need, started_by_s, of_any_size)


@kernel
def _evict_from_server(
    r: Round, server: int, need: int, started_by_s: float, of_any_size: bool
) -> None:
    for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
        device = r.layout.order[at]
        row = r.holders[device, 0]
        while row >= 0 and _can_leave(r, row, need, started_by_s, of_any_size):
            r.stays[row] = False
            _evict(r, row)
            row = r.holders[device, 0]


@kernel
def _can_leave(r: Round, row: int, need: int, started_by_s: float, of_any_size: bool) -> bool:
    rows = r.jobs.rows
    is_blocking = of_any_size or rows.gang[row] < need
    has_run: bool = rows.started_s[row] <= started_by_s
    stays = bool(r.stays[row]) and not r.is_kept[row]
    return stays and is_blocking and has_run


@kernel
def _evict(r: Round, row: int) -> None:
    for server in range(r.num_free.shape[0]):
        for at in range(r.layout.server_ptr[server], r.layout.server_ptr[server + 1]):
            device = r.layout.order[at]
            if r.holders[device, 1] == row:
                r.holders[device, 1] = -1
            elif r.holders[device, 0] == row:
                r.holders[device, 0] = r.holders[device, 1]
                r.holders[device, 1] = -1
                r.num_free[server] += r.holders[device, 0] < 0
                # A server before the first free one may have devices again.
                r.first[:] = 0
