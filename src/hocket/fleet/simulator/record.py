"""What a simulation writes down as it goes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.fleet.rounds.actions import Actions
from hocket.fleet.rounds.state import State
from hocket.fleet.simulator.bind import Work
from hocket.fleet.simulator.fleet_run import FleetRun, Spans

Counts = NDArray[np.int64]

_MAX_SPANS = 2_000_000


class Recorder:
    """Collects what `FleetRun` holds."""

    def __init__(self, work: Work, state: State, records_spans: bool) -> None:
        count = len(work.trace)
        self._work = work
        self._end_s = np.full(count, np.nan)
        self._start_s = np.full(count, np.nan)
        self._held_s, self._target_s = np.zeros(count), np.zeros(count)
        self._is_finished = np.zeros(count, dtype=bool)
        self._busy = np.zeros(state.num_kinds)
        self._busy_device_s = np.zeros(state.num_kinds)
        self._up_device_s = np.zeros(state.num_kinds)
        self._samples: list[tuple[float, *tuple[float, ...]]] = []
        self._num_starts = self._num_stops = 0
        self._spans = SpanRecorder(state) if records_spans else None

    def note(
        self, before: State, state: State, actions: Actions, ended: tuple[int, ...], is_finish: bool
    ) -> None:
        """Take in a step."""
        passed_s = state.time_s - before.time_s
        if passed_s > 0.0:
            self._busy_device_s += passed_s * self._busy
            self._up_device_s += passed_s * before.layout.num_devices
        if len(actions.started) or len(actions.stopped):
            held = state.device_kind[state.holders[:, 0] >= 0]
            self._busy = np.bincount(held, minlength=state.num_kinds).astype(float)
            fresh = actions.started[actions.started_attempt == 1]
            self._start_s[fresh] = state.time_s
            self._num_starts += len(actions.started)
            self._num_stops += int((actions.stopped_reason <= 1).sum())
            if self._spans is not None:
                self._spans.note(state)
        if state.round_number != before.round_number:
            self._samples.append((state.time_s, *self._busy.tolist()))
        for number in ended:
            row = before.jobs.rows[before.row_of(number)]
            last_s = (state.time_s - row["counted_s"]) * (row["kind"] >= 0)
            self._end_s[number] = state.time_s
            self._is_finished[number] = is_finish
            self._held_s[number] = row["held_s"] + last_s
            share = before.jobs.shares[before.row_of(number)].sum() + row["pair_share"]
            self._target_s[number] = row["target_s"] + share * (state.time_s - row["counted_s"])

    def finished(
        self, state: State, measured: tuple[int, int], left_out: Counts, cpu_seconds: float
    ) -> FleetRun:
        """The record of the whole run."""
        samples = np.array(self._samples, dtype=float).reshape(-1, state.num_kinds + 1)
        return FleetRun(
            policy=state.rules.policy,
            mechanism=state.rules.mechanism,
            shares_devices=state.pair_table is not None,
            kinds=state.kinds,
            num_devices=state.num_devices,
            names=self._work.trace.names,
            arrival_s=self._work.trace.arrival_s,
            start_s=self._start_s,
            end_s=self._end_s,
            is_finished=self._is_finished,
            held_s=self._held_s,
            target_s=self._target_s,
            ideal_s=self._work.total_steps / self._work.steps_per_s.max(axis=1).clip(1e-300),
            measured=measured,
            left_out=left_out,
            busy_device_s=self._busy_device_s,
            up_device_s=self._up_device_s,
            cost=float(self._busy_device_s @ state.price_per_hour) / 3600.0,
            num_rounds=state.round_number,
            num_starts=self._num_starts,
            num_preemptions=self._num_stops,
            simulated_s=state.time_s,
            sample_time_s=samples[:, 0],
            sample_busy=samples[:, 1:],
            spans=self._spans.closed(state) if self._spans is not None else None,
            cpu_seconds=cpu_seconds,
        )


class SpanRecorder:
    """Who held each device when, up to a limit."""

    def __init__(self, state: State) -> None:
        self._holders = state.holders
        self._since_s = np.zeros(state.holders.shape)
        self._parts: list[tuple[Counts, Counts, np.ndarray, np.ndarray]] = []
        self._size = 0

    def note(self, state: State) -> None:
        """Close the spans of devices whose holder changed."""
        if len(state.holders) != len(self._holders) or self._size > _MAX_SPANS:
            return
        device, slot = np.nonzero(state.holders != self._holders)
        number = self._holders[device, slot]
        held = number >= 0
        since_s = self._since_s[device, slot][held]
        end_s = np.full(len(since_s), state.time_s)
        self._parts.append((device[held], number[held], since_s, end_s))
        self._size += len(since_s)
        self._since_s[device, slot] = state.time_s
        self._holders = state.holders

    def closed(self, state: State) -> Spans:
        """All spans; those that go on end now."""
        self.note(state.but(holders=np.full_like(state.holders, -1)))
        columns = zip(*self._parts, strict=True) if self._parts else [()] * 4
        device, number, start_s, end_s = (
            np.concatenate(part) if part else np.zeros(0) for part in columns
        )
        return Spans(
            device_names=state.device_names,
            device=device.astype(np.int64),
            number=number.astype(np.int64),
            start_s=start_s,
            end_s=end_s,
        )
