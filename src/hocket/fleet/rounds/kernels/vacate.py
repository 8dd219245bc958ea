"""Room on one server for a gang that cannot be spread, made by those who stand in its way."""

from __future__ import annotations

from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Floor, StopsAndStarts, Wishes
from hocket.kernels import kernel


@kernel
def vacate_server(
    jobs: Jobs,
    kind: int,
    need: int,
    started_by_s: float,
    of_any_size: bool,
    wishes: Wishes,
    floor: Floor,
    changes: StopsAndStarts,
) -> None:
    """Where no server has room for a gang, jobs that would stay leave the emptiest that can.

    Those leave that are not kept, run since ``started_by_s`` at least and, but for ``of_any_size``,
    are smaller than the gang. They are placed anew, or stopped where nothing is left for them.
    """
    best, most_free = -1, -1
    for server in range(floor.num_free.shape[0]):
        if floor.server_kind[server] != kind:
            continue
        if floor.num_free[server] >= need:
            return
        num_free = 0
        for at in range(floor.server_ptr[server], floor.server_ptr[server + 1]):
            row = floor.holders[floor.order[at], 0]
            is_leaving = row >= 0 and _can_leave(
                jobs, row, need, started_by_s, of_any_size, wishes, changes
            )
            num_free += row < 0 or is_leaving
        if num_free >= need and floor.num_free[server] > most_free:
            best, most_free = server, floor.num_free[server]
    if best >= 0:
        _clear(jobs, best, need, started_by_s, of_any_size, wishes, floor, changes)


@kernel
def _clear(
    jobs: Jobs,
    server: int,
    need: int,
    started_by_s: float,
    of_any_size: bool,
    wishes: Wishes,
    floor: Floor,
    changes: StopsAndStarts,
) -> None:
    for at in range(floor.server_ptr[server], floor.server_ptr[server + 1]):
        device = floor.order[at]
        row = floor.holders[device, 0]
        while row >= 0 and _can_leave(jobs, row, need, started_by_s, of_any_size, wishes, changes):
            changes.stays[row] = False
            _evict(row, floor)
            row = floor.holders[device, 0]


@kernel
def _can_leave(
    jobs: Jobs,
    row: int,
    need: int,
    started_by_s: float,
    of_any_size: bool,
    wishes: Wishes,
    changes: StopsAndStarts,
) -> bool:
    is_in_the_way = of_any_size or jobs.rows.gang[row] < need
    has_run: bool = jobs.rows.started_s[row] <= started_by_s
    stays = bool(changes.stays[row]) and not wishes.is_kept[row]
    return stays and is_in_the_way and has_run


@kernel
def _evict(row: int, floor: Floor) -> None:
    for server in range(floor.num_free.shape[0]):
        for at in range(floor.server_ptr[server], floor.server_ptr[server + 1]):
            device = floor.order[at]
            if floor.holders[device, 1] == row:
                floor.holders[device, 1] = -1
            elif floor.holders[device, 0] == row:
                floor.holders[device, 0] = floor.holders[device, 1]
                floor.holders[device, 1] = -1
                floor.num_free[server] += floor.holders[device, 0] < 0
                floor.first[:] = 0
