"""A whole round, or what is given out between two: wishes, choice, devices, as one call."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.fleet.rounds.kernels.order import order_by_debt, order_by_share
from hocket.fleet.rounds.kernels.place import hand_out
from hocket.fleet.rounds.kernels.rates import row_of
from hocket.fleet.rounds.kernels.timeline import Timeline
from hocket.fleet.rounds.rules import is_bound
from hocket.fleet.rounds.rules import is_kept as must_be_kept
from hocket.fleet.rounds.state import DeviceLayout, Jobs
from hocket.fleet.rounds.tables import (
    Asked,
    Floor,
    Pace,
    RoundChoice,
    RoundScratch,
    Speeds,
    StopsAndStarts,
    Wishes,
)
from hocket.kernels import kernel

_RUNNING = 1
_MAX_TRIES = 8
"""Attempts at a round; each takes the wishes of gangs back that found no server with scratch."""


@kernel
def play(
    time_s: float,
    jobs: Jobs,
    asked: Asked,
    pace: Pace,
    speeds: Speeds,
    layout: DeviceLayout,
    holders: LongArray,
    scratch: RoundScratch,
) -> None:
    """Give devices to the most urgent; ``jobs`` and ``room`` say afterwards who has them."""
    num_jobs, num_kinds = jobs.shares.shape
    sizes, servers = 2 * num_kinds, 2 * num_kinds + 3
    wishes = Wishes(
        scratch.by_wish[0],
        scratch.parts,
        scratch.by_wish[1],
        scratch.keys[:3],
        scratch.keys[3:],
        scratch.by_wish[2],
        scratch.marks[0, :num_jobs],
        scratch.marks[5, :num_jobs],
        scratch.marks[1],
        asked.pairs,
        asked.queue,
        scratch.queue_at,
    )
    choice = RoundChoice(
        scratch.by_job[0, :num_jobs],
        scratch.by_job[1, :num_jobs],
        scratch.few[:num_kinds],
        scratch.by_job[9, :num_jobs],
        scratch.moments[:num_jobs],
    )
    floor = Floor(
        scratch.holders,
        layout.order,
        layout.server_ptr,
        layout.server_kind,
        scratch.few[servers:],
        scratch.few[num_kinds:sizes],
        scratch.slots,
        scratch.moments[num_jobs:],
    )
    timeline = Timeline(scratch.steps[0], scratch.steps[1], scratch.num_steps)
    changes = StopsAndStarts(
        scratch.marks[2, :num_jobs],
        scratch.marks[3, :num_jobs],
        scratch.marks[4, :num_jobs],
        scratch.by_job[2:5],
        scratch.by_job[5:8],
        scratch.by_job[8],
        scratch.device,
        scratch.few[sizes:servers],
    )
    _count_stoppable(jobs, layout, scratch.bound)
    num_parts = _order(time_s, jobs, asked, pace, layout, scratch.bound, wishes)
    for tries_left in range(_MAX_TRIES - 1, -1, -1):
        _clear(asked, layout, holders, wishes, choice, floor, changes)
        is_final = tries_left == 0
        if hand_out(
            time_s,
            jobs,
            num_parts,
            wishes,
            pace,
            is_final,
            layout.largest_server,
            speeds,
            choice,
            floor,
            changes,
            timeline,
        ):
            break


@kernel
def _order(
    time_s: float,
    jobs: Jobs,
    asked: Asked,
    pace: Pace,
    layout: DeviceLayout,
    stoppable: LongArray,
    wishes: Wishes,
) -> int:
    for i in range(wishes.is_reserved.shape[0]):
        wishes.is_reserved[i] = False
    for wish in range(wishes.is_withdrawn.shape[0]):
        wishes.is_withdrawn[wish] = False
    _keep(time_s, jobs, pace, wishes.is_kept)
    if pace.by_share:
        return order_by_share(jobs, asked.kinds, layout.largest_server, wishes)
    first_pair = jobs.rows.shape[0] * jobs.shares.shape[1]
    for pair in range(asked.urgency.shape[0]):
        wishes.keys[0, first_pair + pair] = asked.urgency[pair]
        wishes.keys[1, first_pair + pair] = 0.0
        wishes.keys[2, first_pair + pair] = 0.0
    return order_by_debt(jobs, time_s, pace, stoppable, layout.largest_server, wishes)


@kernel
def _keep(time_s: float, jobs: Jobs, pace: Pace, is_kept: BoolArray) -> None:
    """Mark running jobs that nobody may stop or move, and those beside them."""
    keeps_all = pace.keeps_running or pace.keeps_line
    for i in range(jobs.rows.shape[0]):
        ran_s = time_s - jobs.rows.started_s[i]
        bound = is_bound(jobs.rows.preemptible[i])
        is_running = jobs.rows.phase[i] == _RUNNING
        # Devices were collected for a gang among bound jobs: it has a turn before it gives way.
        is_collected = jobs.rows.gang[i] > 1 and pace.reserve_after_s < np.inf
        least_s = pace.min_turn_s if is_collected else pace.min_run_s
        is_kept[i] = must_be_kept(is_running, bound, ran_s, least_s, keeps_all)
    for i in range(jobs.rows.shape[0]):
        if is_kept[i] and jobs.rows.partner[i] >= 0:
            is_kept[row_of(jobs, jobs.rows.partner[i])] = True


@kernel
def _count_stoppable(jobs: Jobs, layout: DeviceLayout, stoppable: LongArray) -> None:
    """Devices of each kind that are free, or held by jobs that may be stopped."""
    for kind in range(stoppable.shape[0]):
        stoppable[kind] = layout.num_devices[kind]
    for i in range(jobs.rows.shape[0]):
        if jobs.rows.phase[i] == _RUNNING and is_bound(jobs.rows.preemptible[i]):
            stoppable[jobs.rows.kind[i]] -= jobs.rows.gang[i]


@kernel
def _clear(
    asked: Asked,
    layout: DeviceLayout,
    holders: LongArray,
    wishes: Wishes,
    choice: RoundChoice,
    floor: Floor,
    changes: StopsAndStarts,
) -> None:
    """Nobody is chosen yet, and all stand where they stood."""
    for kind in range(choice.free.shape[0]):
        choice.free[kind] = layout.num_devices[kind]
        floor.first[kind] = 0
    for profile in range(asked.queue_at.shape[0]):
        wishes.queue_at[profile, 0] = asked.queue_at[profile, 0]
        wishes.queue_at[profile, 1] = asked.queue_at[profile, 1]
    for device in range(holders.shape[0]):
        floor.holders[device, 0] = holders[device, 0]
        floor.holders[device, 1] = holders[device, 1]
    for server in range(floor.closed_s.shape[0]):
        floor.closed_s[server] = np.inf
    for i in range(changes.is_placed.shape[0]):
        changes.is_placed[i] = False
    for part in range(changes.size.shape[0]):
        changes.size[part] = 0
    changes.device_ptr[0] = 0
