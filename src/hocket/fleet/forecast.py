"""Forecast the jobs of a fleet by running its state forward with the same ``step``.

No jobs arrive, nothing fails, and a job ends when its rate says so, as in the simulator, or at its
time limit if that is earlier. A job with neither a known length nor a limit never ends. Another
policy, more devices or fewer answer "what if". The number of events is bounded, and the result
says where it was cut off. O(events x jobs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.base.errors import UsageError, unknown_name
from hocket.base.jsonfile import finite_or_none
from hocket.fleet.policies import find_policy
from hocket.fleet.rounds.actions import MOVED, Actions
from hocket.fleet.rounds.dependencies import next_limit_s, over_limit
from hocket.fleet.rounds.events import AddDevices, Event, Finish, RemoveDevices, Tick, TimeOut
from hocket.fleet.rounds.share import consolidated_steps_per_s
from hocket.fleet.rounds.state import ENDED, RUNNING, UNDECIDED, FleetDevice, FleetState
from hocket.fleet.rounds.step import step

MAX_ADDED_DEVICES = 10_000
_JOBS_IN_TIME = 150_000
"""The forecast stops when events times jobs reach this number; it is then still fast enough for
interactive use.
"""
_JOBS_PER_EVENT = 300
"""Fixed costs of an event, as a number of jobs."""
_MANY_JOBS = 512
"""Above this many jobs, starts are predicted to half a round."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Forecast:
    """Start and end of each job of a state; NaN if that is beyond the forecast."""

    policy: str
    time_s: float
    """The moment from which it looks forward."""
    reached_s: float
    """End of the forecast."""
    is_cut_off: bool
    """True if it stopped at its limit, with jobs left that would still start or end."""
    num_events: int
    num_preemptions: int
    numbers: LongArray
    names: tuple[str, ...]
    submitted_s: FloatArray
    start_s: FloatArray
    """Time at which a job next gets devices; the moment of the forecast for one that holds some."""
    end_s: FloatArray
    busy_device_s: FloatArray
    """``[type]``, as what follows."""
    up_device_s: FloatArray

    @property
    def num_ended(self) -> int:
        """Jobs that ended within the forecast."""
        return int(np.isfinite(self.end_s).sum())

    @property
    def average_completion_s(self) -> float:
        """Mean time from submission to end, of the jobs that ended; NaN where none did."""
        ended = np.isfinite(self.end_s)
        return float((self.end_s - self.submitted_s)[ended].mean()) if ended.any() else np.nan

    @property
    def last_end_s(self) -> float:
        """End of the last job; NaN if none ended."""
        ended = self.end_s[np.isfinite(self.end_s)]
        return float(ended.max()) if len(ended) else np.nan

    @property
    def utilisation(self) -> float:
        """Part of the device time that is used; NaN if no time passes."""
        up_s = float(self.up_device_s.sum())
        return float(self.busy_device_s.sum()) / up_s if up_s > 0.0 else np.nan

    def start_of(self, number: int) -> float | None:
        """Start of a job, or None."""
        return finite_or_none(self.start_s[self._row(number)])

    def end_of(self, number: int) -> float | None:
        """End of a job, or None."""
        return finite_or_none(self.end_s[self._row(number)])

    def to_data(self) -> dict[str, Any]:
        """Convert to plain data; null for unknown values."""
        jobs = zip(self.numbers.tolist(), self.names, self.start_s, self.end_s, strict=True)
        return {
            "policy": self.policy,
            "time_s": self.time_s,
            "reached_s": self.reached_s,
            "is_cut_off": self.is_cut_off,
            "num_events": self.num_events,
            "num_jobs": len(self.numbers),
            "num_ended": self.num_ended,
            "num_preemptions": self.num_preemptions,
            "average_completion_s": finite_or_none(self.average_completion_s),
            "last_end_s": finite_or_none(self.last_end_s),
            "utilisation": finite_or_none(self.utilisation),
            "jobs": [
                {
                    "number": number,
                    "name": name,
                    "start_s": finite_or_none(start),
                    "end_s": finite_or_none(end),
                }
                for number, name, start, end in jobs
            ],
        }

    def _row(self, number: int) -> int:
        row = int(np.searchsorted(self.numbers, number))
        if row >= len(self.numbers) or self.numbers[row] != number:
            raise UsageError(f"there is no job {number}", hint="it may have ended")
        return row


def forecast(
    state: FleetState,
    *,
    policy: str | None = None,
    add: tuple[FleetDevice, ...] = (),
    remove: tuple[str, ...] = (),
    until_started: Iterable[int] | None = None,
    grain_s: float = 0.0,
    max_events: int | None = None,
) -> Forecast:
    """Run a state forward until all jobs have ended, or the given jobs have started.

    With another ``policy`` shares are computed anew at the next round; devices change at once. Jobs
    that end within ``grain_s`` of each other end together, which looks further ahead for the same
    work, with an error below that per end. Without ``max_events`` it takes a second or two at most.
    Raises `UsageError` for unknown names.
    """
    # A full forecast may take twice as long as one of a first start.
    most = 2 * affordable_events(state) if max_events is None else max_events
    policy = policy or state.rules.policy
    find_policy(policy)
    run = _ForecastRun(state, None if until_started is None else set(until_started))
    if policy != state.rules.policy:
        rules = replace(state.rules, policy=policy)
        run.state = state.but(rules=rules, is_dirty=True, solved_s=-np.inf, warm=None)
    for event in _changes_of_devices(state, add, remove):
        run.take(event)
    run.expect()
    while not run.is_over() and run.num_events < most:
        following = next_event(run.state, grain_s)
        if following is None:
            break
        run.take(following)
    return run.result()


def first_start(state: FleetState, number: int) -> Forecast:
    """Forecast until a job gets devices; takes some tenths of a second at most."""
    state.row_of(number)
    return first_starts(state, (number,))


def first_starts(state: FleetState, numbers: Iterable[int]) -> Forecast:
    """Forecast until each of these jobs has had devices; takes some tenths of a second at most."""
    return forecast(
        state,
        until_started=numbers,
        grain_s=affordable_grain_s(state),
        max_events=affordable_events(state),
    )


def earliest_start(state: FleetState, number: int) -> Forecast:
    """As `first_start`, assuming that jobs with unknown preemptibility save their work."""
    rows = state.jobs.rows.copy()
    rows["preemptible"][rows["preemptible"] == UNDECIDED] = 1
    return first_start(state.but(jobs=state.jobs._replace(rows=rows)), number)


def affordable_events(state: FleetState) -> int:
    """Number of events that take some tenths of a second; an event costs more with more jobs."""
    return max(_JOBS_IN_TIME // (len(state.jobs.rows) + _JOBS_PER_EVENT), 50)


def affordable_grain_s(state: FleetState) -> float:
    """Accuracy of predicted ends in seconds: half a round if there are many jobs."""
    return state.rules.round_s / 2.0 if len(state.jobs.rows) > _MANY_JOBS else 0.0


def resized(
    state: FleetState, counts: Mapping[str, int]
) -> tuple[tuple[FleetDevice, ...], tuple[str, ...]]:
    """Devices to add and names to remove to reach given counts by device type; idle devices go
    first."""
    add: list[FleetDevice] = []
    remove: list[str] = []
    for device_type, count in counts.items():
        if device_type not in state.device_types:
            raise unknown_name("device type", device_type, state.device_types)
        if count < 0:
            raise UsageError(f"there cannot be {count} devices of type {device_type!r}")
        more = count - int(state.num_devices[state.device_types.index(device_type)])
        if more > MAX_ADDED_DEVICES:
            hint = f"at most {MAX_ADDED_DEVICES:,} more than there are"
            raise UsageError(f"{count} devices of type {device_type!r} are too many", hint=hint)
        add.extend(_fresh_devices(state, device_type, more))
        remove.extend(_least_used(state, device_type, -more))
    return tuple(add), tuple(remove)


def at_moment(state: FleetState, time_s: float) -> FleetState:
    """Bring the figures of a state up to a later moment of the same round."""
    if not state.time_s < time_s < state.next_tick_s:
        return state
    return step(state, Tick(time_s=time_s))[0]


def next_event(state: FleetState, grain_s: float = 0.0) -> Event | None:
    """The next event if nothing else happens: ends of jobs, or a round; None for nothing."""
    from hocket.fleet.rounds.kernels.count import first_to_finish

    end_s, row = first_to_finish(state.jobs)
    limit_s = next_limit_s(state)
    first_s = min(end_s, limit_s, state.next_tick_s)
    if not np.isfinite(first_s):
        return None
    if state.next_tick_s < min(end_s, limit_s):
        return Tick(time_s=max(state.next_tick_s, state.time_s))
    if limit_s < end_s:
        return TimeOut(time_s=max(limit_s, state.time_s), numbers=over_limit(state, limit_s))
    if grain_s > 0.0:
        return _ends_together(state, float(end_s), grain_s)
    number = int(state.jobs.rows["number"][row])
    return Finish(time_s=max(float(end_s), state.time_s), numbers=(number,))


def _ends_together(state: FleetState, first_s: float, grain_s: float) -> Finish:
    """Combine all ends within a grain of the first into one, at their mean."""
    rows = state.jobs.rows
    some = rows[(rows["phase"] == RUNNING) & (rows["rate"] > 0.0)]
    left_s = (some["total_steps"] - some["done_steps"]) / some["rate"]
    end_s = np.maximum(some["counted_s"], some["ready_s"]) + left_s
    together = end_s <= min(first_s + grain_s, state.next_tick_s)
    mean_s = max(float(end_s[together].mean()), state.time_s)
    return Finish(time_s=mean_s, numbers=tuple(some["number"][together].tolist()))


def _changes_of_devices(
    state: FleetState, add: tuple[FleetDevice, ...], remove: tuple[str, ...]
) -> Iterable[Event]:
    for name in remove:
        if name not in state.device_names:
            raise unknown_name("device", name, state.device_names)
    if remove:
        yield RemoveDevices(time_s=state.time_s, names=remove)
    if add:
        yield AddDevices(time_s=state.time_s, devices=add)


def _fresh_devices(state: FleetState, device_type: str, count: int) -> Iterable[FleetDevice]:
    taken = set(state.device_names)
    number = 0
    while count > 0:
        name = f"{device_type}-more-{number}"
        number += 1
        if name not in taken:
            count -= 1
            yield FleetDevice(name=name, device_type=device_type)


def _least_used(state: FleetState, device_type: str, count: int) -> list[str]:
    if count <= 0:
        return []
    up = np.flatnonzero(
        state.is_up & (state.type_of_device == state.device_types.index(device_type))
    )
    is_held = state.holders[up, 0] >= 0
    order = up[np.lexsort((-up, is_held))]
    return [state.device_names[device] for device in order[:count]]


class _ForecastRun:
    """State and figures of a forecast while it runs."""

    def __init__(self, state: FleetState, wanted: set[int] | None) -> None:
        live = state.jobs.rows[state.jobs.rows["phase"] != ENDED]
        self.state = state
        self.num_events = self._num_stops = 0
        self._first = state
        self._wanted = wanted
        self._numbers = np.ascontiguousarray(live["number"])
        self._submitted_s = np.ascontiguousarray(live["submitted_s"])
        self._start_s = np.where(live["phase"] == RUNNING, state.time_s, np.nan)
        self._end_s = np.full(len(live), np.nan)
        self._can_run = self._can_end = np.zeros(len(live), dtype=bool)
        self._busy = _busy_devices(state)
        self._busy_device_s, self._up_device_s = np.zeros((2, state.num_types))

    def expect(self) -> None:
        """Note which jobs can run on the devices that there are, and which of them will end."""
        rows = self.state.jobs.rows
        able = rows["phase"] != ENDED
        fits = self.state.num_devices >= rows["gang"][:, None]
        if len(rows):
            speeds = consolidated_steps_per_s(self.state, self.state.jobs, np.arange(len(rows)))
            able &= ((speeds > 0.0) & fits).any(axis=1)
        ends = able & np.isfinite(np.minimum(rows["total_steps"], rows["time_limit_s"]))
        self._can_run = np.isin(self._numbers, rows["number"][able])
        self._can_end = np.isin(self._numbers, rows["number"][ends])
        if self._wanted is not None:
            self._wanted &= set(self._numbers[self._still_to_come()[0]].tolist())

    def is_over(self) -> bool:
        """True if everything that was asked for is known."""
        if self._wanted is not None:
            return not self._wanted
        return not np.any(self._still_to_come())

    def _still_to_come(self) -> tuple[BoolArray, BoolArray]:
        """Masks of the jobs that can still start and of those that can still end."""
        rows = self.state.jobs.rows
        # Jobs that wait for other jobs count only once those have ended, which may never happen.
        lives = np.isin(self._numbers, rows["number"][rows["phase"] <= RUNNING])
        starts = lives & self._can_run & np.isnan(self._start_s)
        return starts, lives & self._can_end & np.isnan(self._end_s)

    def take(self, event: Event) -> None:
        """Apply an event and record its results."""
        before = self.state
        self.state, actions = step(before, event)
        self.num_events += 1
        passed_s = self.state.time_s - before.time_s
        if passed_s > 0.0:
            self._busy_device_s += passed_s * self._busy
            self._up_device_s += passed_s * before.num_devices
        if isinstance(event, Finish | TimeOut):
            self._end_s[np.searchsorted(self._numbers, event.numbers)] = self.state.time_s
        if len(actions.started) or len(actions.stopped):
            self._note(actions)

    def _note(self, actions: Actions) -> None:
        self._busy = _busy_devices(self.state)
        self._num_stops += int((actions.stopped_reason <= MOVED).sum())
        at = np.searchsorted(self._numbers, actions.started)
        fresh = at[np.isnan(self._start_s[at])]
        self._start_s[fresh] = self.state.time_s
        if self._wanted is not None:
            self._wanted -= set(self._numbers[fresh].tolist())

    def result(self) -> Forecast:
        """The finished forecast."""
        return Forecast(
            policy=self.state.rules.policy,
            time_s=self._first.time_s,
            reached_s=self.state.time_s,
            is_cut_off=not self.is_over(),
            num_events=self.num_events,
            num_preemptions=self._num_stops,
            numbers=self._numbers,
            names=tuple(self._first.names[number] for number in self._numbers.tolist()),
            submitted_s=self._submitted_s,
            start_s=self._start_s,
            end_s=self._end_s,
            busy_device_s=self._busy_device_s,
            up_device_s=self._up_device_s,
        )


def _busy_devices(state: FleetState) -> FloatArray:
    held = state.type_of_device[(state.holders[:, 0] >= 0) & state.is_up]
    return np.bincount(held, minlength=state.num_types).astype(float)
