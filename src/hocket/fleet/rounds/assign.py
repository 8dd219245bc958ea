"""From wishes in their order to devices, rows and actions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.state import Jobs, State
from hocket.fleet.rounds.tables import Choice, Deal, Floor, Speeds, Wishes, new_changes

Counts = NDArray[np.int64]

_MAX_TRIES = 8
"""Attempts at a round; each takes the wishes of gangs back that found no server with room."""


def assign(
    state: State, jobs: Jobs, num_parts: int, wishes: Wishes, *, keeps_running: bool
) -> tuple[State, Actions]:
    """Give devices to the most urgent; ``jobs`` are writable and become those of the new state."""
    from hocket.fleet.rounds.kernels.place import hand_out

    rules, num_jobs = state.rules, len(jobs.rows)
    deal = Deal(
        time_s=state.time_s,
        restart_s=rules.restart_s,
        min_run_s=rules.min_run_s,
        min_turn_s=max(rules.min_run_s, rules.stickiness_rounds * rules.round_s),
        is_final=False,
        keeps_running=keeps_running,
        needs_share=rules.mechanism == "gavel",
    )
    for tries_left in reversed(range(_MAX_TRIES)):
        choice, floor = _room(state, num_jobs)
        changes = new_changes(num_jobs, len(state.device_names))
        asked = wishes._replace(queue_at=wishes.queue_at.copy())
        deal = deal._replace(is_final=tries_left == 0)
        if hand_out(jobs, num_parts, asked, deal, speeds_of(state), choice, floor, changes):
            break
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


def _room(state: State, num_jobs: int) -> tuple[Choice, Floor]:
    """Nobody is chosen yet, and all stand where they stood."""
    layout = state.layout
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
    return choice, floor


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
