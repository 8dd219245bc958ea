"""From who runs where to devices, rows and actions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.fleet.rounds.actions import MOVED, PREEMPTED, Actions
from hocket.fleet.rounds.state import RUNNING, WAITING, Jobs, State
from hocket.fleet.rounds.tables import Changes, Choice, Floor

Counts = NDArray[np.int64]


def assign(state: State, jobs: Jobs, choice: Choice) -> tuple[State, Actions]:
    """Give devices to the chosen jobs; ``rows`` are writable and become those of the new state."""
    from hocket.fleet.rounds.kernel import place

    floor, changes = _floor(state, jobs), _changes(state, jobs)
    nobody = np.full(len(jobs.rows), -1)
    shares = state.pair_table is not None
    old_partner = rows_of(jobs, jobs.rows["partner"]) if shares else nobody
    was_running = jobs.rows["phase"] == RUNNING
    by_gang = np.argsort(-jobs.rows["gang"], kind="stable")
    place(jobs, choice, old_partner, by_gang, floor, changes)

    stopped = np.flatnonzero(was_running & ~changes.stays)
    started = changes.started[: changes.size[0]]
    reason = np.where(choice.kind[stopped] >= 0, MOVED, PREEMPTED)
    stopped_attempt = jobs.rows["attempt"][stopped]
    _write(state, jobs, choice, stopped, started)
    actions = Actions(
        stopped=jobs.rows["number"][stopped],
        stopped_attempt=stopped_attempt,
        stopped_reason=reason,
        started=jobs.rows["number"][started],
        started_attempt=jobs.rows["attempt"][started],
        partner=jobs.rows["partner"][started],
        device_ptr=changes.device_ptr[: len(started) + 1],
        device=changes.device[: changes.size[1]],
        device_names=state.device_names,
    )
    numbers = np.append(jobs.rows["number"], -1)
    return state.but(jobs=jobs, holders=numbers[floor.holders]), actions


def rows_of(jobs: Jobs, numbers: Counts) -> Counts:
    """Rows of jobs by number; -1 where there is none."""
    if not len(jobs.rows):
        return np.full(numbers.shape, -1)
    at = np.minimum(np.searchsorted(jobs.rows["number"], numbers), len(jobs.rows) - 1)
    return np.where(jobs.rows["number"][at] == numbers, at, -1)


def _floor(state: State, jobs: Jobs) -> Floor:
    layout = state.layout
    return Floor(
        holders=rows_of(jobs, state.holders),
        order=layout.order,
        server_ptr=layout.server_ptr,
        server_kind=layout.server_kind,
        num_free=np.zeros(len(layout.server_kind), dtype=np.int64),
    )


def _changes(state: State, jobs: Jobs) -> Changes:
    return Changes(
        stays=np.zeros(len(jobs.rows), dtype=bool),
        started=np.zeros(len(jobs.rows), dtype=np.int64),
        device_ptr=np.zeros(len(jobs.rows) + 1, dtype=np.int64),
        device=np.zeros(2 * len(state.device_names), dtype=np.int64),
        size=np.zeros(2, dtype=np.int64),
    )


def _write(state: State, jobs: Jobs, choice: Choice, stopped: Counts, started: Counts) -> None:
    jobs.rows["phase"][stopped] = WAITING
    jobs.rows["kind"][stopped] = -1
    jobs.rows["waiting_since_s"][stopped] = state.time_s
    jobs.rows["saved_steps"][stopped] = jobs.rows["done_steps"][stopped]
    jobs.rows["phase"][started] = RUNNING
    jobs.rows["kind"][started] = choice.kind[started]
    jobs.rows["attempt"][started] += 1
    jobs.rows["started_s"][started] = state.time_s
    jobs.rows["ready_s"][started] = state.time_s + state.rules.restart_s
    jobs.rows["measured_s"][started] = state.time_s + state.rules.restart_s
    jobs.rows["measured_steps"][started] = jobs.rows["done_steps"][started]
    if state.pair_table is not None:
        numbers = np.append(jobs.rows["number"], -1)
        jobs.rows["partner"] = numbers[choice.partner]
    set_rates(state, jobs, np.flatnonzero(choice.kind >= 0) if state.pair_table else started)


def set_rates(state: State, jobs: Jobs, running: Counts) -> None:
    """Steps per second of running jobs, alone or beside their partners."""
    kind = jobs.rows["kind"][running]
    rate = jobs.steps_per_s[running, kind]
    if state.pair_table is not None:
        partner = rows_of(jobs, jobs.rows["partner"][running])
        paired = np.flatnonzero(partner >= 0)
        mine, theirs = jobs.rows["profile"][running[paired]], jobs.rows["profile"][partner[paired]]
        rate[paired] = state.pair_table.steps_per_s[mine, theirs, kind[paired]]
    if state.rules.mechanism == "gavel":
        # Gavel counts whole steps in each round.
        whole = np.floor(rate * state.rules.round_s)
        rate = np.where(whole > 0.0, whole / state.rules.round_s, rate)
    jobs.rows["rate"][running] = rate
