"""Content of the page as plain values: a state and a few records in, texts and numbers out.

Names are made inert here and escaped by the templates. Everything is bounded: a fleet of thousands
of jobs gives a page of the same size, which says how much it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from hocket.base.units import format_percent, words_for_seconds
from hocket.fleet.forecast import Forecast
from hocket.fleet.rounds.reasons import free_devices, reason
from hocket.fleet.rounds.state import PAUSED, PHASES, RUNNING, WAITING, FleetState
from hocket.service.page.moments import ago, ahead
from hocket.service.page.recent import Lately
from hocket.service.page.shown import (
    DeviceLine,
    EndedRow,
    JobName,
    Listing,
    LivePage,
    RunningRow,
    ShareRow,
    Stat,
    WaitingRow,
)
from hocket.service.records import AttemptRecord, JobRecord, says_no_more
from hocket.view.fleet_live import Bar, DeviceRow, draw_devices
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.wording import count_of

# Rows of each table, and the rounds that the picture covers.
MAX_ROWS = 50
WINDOW_ROUNDS = 10
# The picture covers at least a minute, also when rounds are short.
_MIN_WINDOW_S = 60.0
_LONGEST_NAME = 80

_SOLVER_NOTES = ("classes", "levels")
"""Notes of a policy on its own work and not on the jobs."""
_NOTHING_YET = Lately()


def live_page(
    state: FleetState,
    lately: Lately = _NOTHING_YET,
    *,
    expected: Forecast | None = None,
    trouble: str = "",
) -> LivePage:
    """The page of a fleet at the moment of its state."""
    phase = state.jobs.rows["phase"]
    counts = {name: int((phase == at).sum()) for at, name in enumerate(PHASES)}
    picture, picture_note = _picture(state, lately)
    return LivePage(
        title=f"{counts['running']} running, {counts['waiting']} waiting – hocket fleet",
        trouble=inert(trouble, LONGEST_SENTENCE),
        stats=_stats(state, counts),
        picture=picture,
        picture_note=picture_note,
        window=words_for_seconds(_drawn_s(state, lately)),
        devices=_devices(state),
        waiting=_waiting(state, expected),
        running=_running(state),
        shares=_shares(state),
        ended=_ended(state, lately.ended),
        paused=_paused(state),
    )


def window_s(state: FleetState) -> float:
    """Longest time that the timeline covers."""
    return max(WINDOW_ROUNDS * state.rules.round_s, _MIN_WINDOW_S)


def _drawn_s(state: FleetState, lately: Lately) -> float:
    """Time that the picture covers: no more than there is something to see."""
    starts_s = [one.started_s for one in lately.attempts if one.started_s is not None]
    age_s = state.time_s - min(starts_s, default=-np.inf)
    return min(window_s(state), max(age_s, _MIN_WINDOW_S))


def job_name(state: FleetState, number: int) -> JobName:
    """Name of a job that has not ended, as the page shows it."""
    row = state.row_of(number)
    team = state.teams[int(state.jobs.rows["team"][row])]
    return JobName(
        number=number,
        name=inert(state.names[number], _LONGEST_NAME),
        team=inert(team, _LONGEST_NAME),
    )


# ── head ─────────────────────────────────────────────────────────────────────────────────────────


def _stats(state: FleetState, counts: Mapping[str, int]) -> tuple[Stat, ...]:
    total = int(state.num_devices.sum())
    used = total - sum(free_devices(state))
    down = len(state.device_names) - total
    next_round = ""
    if np.isfinite(state.next_tick_s):
        next_round = f"next {ahead(state.next_tick_s - state.time_s)}"
    return (
        Stat(label="Running", value=f"{counts['running']:,}"),
        Stat(label="Waiting", value=f"{counts['waiting']:,}"),
        Stat(label="Paused", value=f"{counts['paused']:,}"),
        Stat(
            label="Devices in use",
            value=f"{used:,} of {total:,}",
            note=f"{down:,} not there" if down else "",
        ),
        Stat(label="Round", value=f"{state.round_number:,}", note=next_round),
        Stat(label="Policy", value=state.rules.policy, note=_policy_note(state)),
    )


def _policy_note(state: FleetState) -> str:
    notes = (f"{key}: {text}" for key, text in state.notes.items() if key not in _SOLVER_NOTES)
    return inert("; ".join(notes), 200)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def _picture(state: FleetState, lately: Lately) -> tuple[Markup, str]:
    rows = [
        DeviceRow(name=name, device_type=state.device_types[int(device_type)], is_up=bool(is_up))
        for name, device_type, is_up in zip(
            state.device_names, state.type_of_device, state.is_up, strict=True
        )
    ]
    index = {name: at for at, name in enumerate(state.device_names)}
    bars = [
        bar
        for attempt in lately.attempts
        if attempt.started_s is not None
        for bar in _bars(attempt, lately.names.get(attempt.job, ""), state.time_s, index)
    ]
    drawn = draw_devices(rows, bars, state.time_s - _drawn_s(state, lately), state.time_s)
    hidden = []
    if drawn.num_hidden_devices:
        hidden.append(count_of(drawn.num_hidden_devices, "more device"))
    if drawn.num_hidden_bars:
        hidden.append(count_of(drawn.num_hidden_bars, "older attempt"))
    note = f"Not drawn: {' and '.join(hidden)}." if hidden else ""
    # Drawn by `draw_devices`, which escapes all text.
    return Markup(drawn.svg), note


def _bars(attempt: AttemptRecord, name: str, now_s: float, index: Mapping[str, int]) -> list[Bar]:
    start_s, end_s = attempt.started_s or attempt.decided_s, attempt.ended_s
    lasted = words_for_seconds((end_s or now_s) - start_s)
    outcome = attempt.outcome or ("is being stopped" if attempt.stopping_since_s else "runs")
    devices = ", ".join(attempt.devices[:4]) + (", …" if len(attempt.devices) > 4 else "")
    label = f"{attempt.job} {inert(name, _LONGEST_NAME)}".rstrip()
    return [
        Bar(
            device=index[device],
            job=attempt.job,
            label=label,
            start_s=start_s,
            end_s=end_s,
            note=f"job {label}, attempt {attempt.attempt} on {devices}: {lasted}, {outcome}",
            is_bad=attempt.outcome in ("failed", "lost", "device lost"),
        )
        for device in attempt.devices
        if device in index
    ]


def _devices(state: FleetState) -> Listing[DeviceLine]:
    shown = range(min(len(state.device_names), MAX_ROWS))
    rows = []
    for at in shown:
        numbers = [number for number in state.holders[at].tolist() if number >= 0]
        used = "in use" if numbers else "free"
        rows.append(
            DeviceLine(
                name=inert(state.device_names[at], _LONGEST_NAME),
                device_type=inert(state.device_types[int(state.type_of_device[at])], _LONGEST_NAME),
                state=used if state.is_up[at] else "not there",
                jobs=tuple(job_name(state, number) for number in numbers),
            )
        )
    return Listing(rows=tuple(rows), num_more=len(state.device_names) - len(rows))


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────


def _rows_in(state: FleetState, phase: int) -> list[int]:
    rows: list[int] = np.flatnonzero(state.jobs.rows["phase"] == phase).tolist()
    return rows


def _number(state: FleetState, row: int) -> int:
    return int(state.jobs.rows["number"][row])


def _waiting(state: FleetState, expected: Forecast | None) -> Listing[WaitingRow]:
    """The queue, sorted by expected start."""
    starts = _starts(expected)
    waiting = sorted(
        _rows_in(state, WAITING),
        key=lambda row: (starts.get(_number(state, row), np.inf), row),
    )
    later = ""
    if expected is not None and expected.is_cut_off:
        later = f"not within {words_for_seconds(expected.reached_s - state.time_s)}"
    rows = tuple(
        _waiting_row(state, row, starts.get(_number(state, row)), later)
        for row in waiting[:MAX_ROWS]
    )
    return Listing(rows=rows, num_more=len(waiting) - len(rows))


def _starts(expected: Forecast | None) -> dict[int, float]:
    if expected is None:
        return {}
    known = np.isfinite(expected.start_s)
    numbers, times = expected.numbers[known].tolist(), expected.start_s[known].tolist()
    return dict(zip(numbers, times, strict=True))


def _waiting_row(state: FleetState, row: int, start_s: float | None, later: str) -> WaitingRow:
    number, job = _number(state, row), state.jobs.rows[row]
    return WaitingRow(
        job=job_name(state, number),
        gang=int(job["gang"]),
        since=words_for_seconds(state.time_s - float(job["waiting_since_s"])),
        start=later or "not predicted" if start_s is None else ahead(start_s - state.time_s),
        reason=inert(reason(state, number), LONGEST_SENTENCE),
    )


def _running(state: FleetState) -> Listing[RunningRow]:
    running = _rows_in(state, RUNNING)
    rows = tuple(_running_row(state, row) for row in running[:MAX_ROWS])
    return Listing(rows=rows, num_more=len(running) - len(rows))


def _running_row(state: FleetState, row: int) -> RunningRow:
    number, job = _number(state, row), state.jobs.rows[row]
    total, done, rate = (float(job[name]) for name in ("total_steps", "done_steps", "rate"))
    is_known = np.isfinite(total)
    left_s = (total - done) / rate if is_known and rate > 0.0 else np.nan
    return RunningRow(
        job=job_name(state, number),
        devices=_device_words(state.devices_of(number)),
        since=words_for_seconds(state.time_s - float(job["started_s"])),
        done=done / total if is_known else None,
        progress=format_percent(done / total) if is_known else f"{done:,.0f} steps",
        end=ahead(left_s) if np.isfinite(left_s) else "unknown",
    )


def _device_words(names: Sequence[str]) -> str:
    shown = ", ".join(inert(name, 40) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _shares(state: FleetState) -> Listing[ShareRow]:
    """Jobs that got least of what they were promised first."""
    rows = state.jobs.rows
    live = np.flatnonzero((rows["phase"] == WAITING) | (rows["phase"] == RUNNING))
    missing_s = rows["target_s"][live] - rows["held_s"][live]
    order = live[np.argsort(-missing_s, kind="stable")]
    shown = tuple(_share_row(state, int(row)) for row in order[:MAX_ROWS])
    return Listing(rows=shown, num_more=len(live) - len(shown))


def _share_row(state: FleetState, row: int) -> ShareRow:
    job = state.jobs.rows[row]
    held_s, target_s = float(job["held_s"]), float(job["target_s"])
    received = words_for_seconds(held_s)
    if target_s > 0.0:
        received += f" of {words_for_seconds(target_s)}"
    return ShareRow(
        job=job_name(state, _number(state, row)),
        phase=PHASES[int(job["phase"])],
        target=format_percent(float(state.jobs.shares[row].sum() + job["pair_share"])),
        received=received,
        ratio=held_s / target_s if target_s > 0.0 else None,
    )


def _paused(state: FleetState) -> Listing[JobName]:
    paused = _rows_in(state, PAUSED)
    rows = tuple(job_name(state, _number(state, row)) for row in paused[:MAX_ROWS])
    return Listing(rows=rows, num_more=len(paused) - len(rows))


def _ended(state: FleetState, records: Sequence[JobRecord]) -> Listing[EndedRow]:
    rows = tuple(
        EndedRow(
            job=named(record),
            status=record.status,
            ended=ago(state.time_s - (record.ended_s or state.time_s)),
            message=inert("" if says_no_more(record) else record.message, LONGEST_SENTENCE),
        )
        for record in records[:MAX_ROWS]
    )
    return Listing(rows=rows, num_more=0)


def named(record: JobRecord) -> JobName:
    """Name of a job from its record, as the page shows it."""
    return JobName(
        number=record.number,
        name=inert(record.spec.name, _LONGEST_NAME),
        team=inert(record.spec.team, _LONGEST_NAME),
    )
