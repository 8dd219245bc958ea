"""From wishes in their order to devices, rows and actions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.state import Jobs, State
from hocket.fleet.rounds.tables import Choice, Deal, Floor, Speeds, Wishes, new_changes

Counts = NDArray[np.int64]


def assign(
    state: State, jobs: Jobs, num_parts: int, wishes: Wishes, *, keeps_running: bool
) -> tuple[State, Actions]:
    """Give devices to the most urgent; ``jobs`` are writable and become those of the new state."""
    from hocket.fleet.rounds.kernels.place import hand_out

    rules, layout, num_jobs = state.rules, state.layout, len(jobs.rows)
    deal = Deal(state.time_s, rules.restart_s, keeps_running, rules.mechanism == "gavel")
    choice = Choice(
        kind=np.empty(num_jobs, dtype=np.int64),
        partner=np.empty(num_jobs, dtype=np.int64),
        free=layout.num_devices.copy(),
    )
    floor = Floor(
        holders=state.holders.copy(),
        order=layout.order,
        server_ptr=layout.server_ptr,
        server_kind=layout.server_kind,
        num_free=np.empty(len(layout.server_kind), dtype=np.int64),
    )
    changes = new_changes(num_jobs, len(state.device_names))
    hand_out(jobs, num_parts, wishes, deal, speeds_of(state), choice, floor, changes)
    num_stopped, num_started, num_devices = changes.size.tolist()
    stopped, started = changes.stopped[:, :num_stopped], changes.started[:, :num_started]
    actions = Actions(
        stopped=stopped[0],
        stopped_attempt=stopped[1],
        stopped_reason=stopped[2],
        started=started[0],
        started_attempt=started[1],
        partner=started[2],
        device_ptr=changes.device_ptr[: num_started + 1],
        device=changes.device[:num_devices],
        device_names=state.device_names,
    )
    return state.but(jobs=jobs, holders=floor.holders), actions


def speeds_of(state: State) -> Speeds:
    """What rates depend on, beside the jobs."""
    whole_s = state.rules.round_s if state.rules.mechanism == "gavel" else 0.0
    if state.pair_table is None:
        return _speeds_alone(state.num_kinds, whole_s)
    return Speeds(beside=state.pair_table.steps_per_s, whole_s=whole_s)


@lru_cache(maxsize=64)
def _speeds_alone(num_kinds: int, whole_s: float) -> Speeds:
    return Speeds(beside=np.zeros((0, 0, num_kinds)), whole_s=whole_s)


def rows_of(jobs: Jobs, numbers: Counts) -> Counts:
    """Rows of jobs by number; -1 where there is none."""
    if not len(jobs.rows):
        return np.full(numbers.shape, -1)
    at = np.minimum(np.searchsorted(jobs.rows["number"], numbers), len(jobs.rows) - 1)
    return np.where(jobs.rows["number"][at] == numbers, at, -1)
