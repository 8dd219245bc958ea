"""Record of a simulation."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.actions import MOVED, Actions
from hocket.fleet.rounds.state import FleetState
from hocket.fleet.simulator.bind import TraceWork
from hocket.fleet.simulator.fleet_run import FleetRun, HoldSpans

# Memory limit of the recorded spans.
_MAX_SPANS = 2_000_000


class FleetRecorder:
    """Collects the figures of a `FleetRun` during a simulation."""

    def __init__(self, work: TraceWork, state: FleetState, records_spans: bool) -> None:
        count, num_types = len(work.trace), state.num_types
        self._work = work
        self._start_s = np.full(count, np.nan)
        self._busy = np.zeros(num_types)
        """Devices of each type that are in use now."""
        self._busy_device_s, self._up_device_s = np.zeros(num_types), np.zeros(num_types)
        self._num_starts = self._num_preemptions = 0
        self._end_s = np.full(count, np.nan)
        self._held_s, self._target_s = np.zeros(count), np.zeros(count)
        self._is_finished = np.zeros(count, dtype=bool)
        self._samples = [(state.time_s, *self._busy_device_s.tolist())]
        self._spans = SpanRecorder(state) if records_spans else None

    def note(self, before: FleetState, state: FleetState, actions: Actions) -> None:
        """Record a step."""
        passed_s = state.time_s - before.time_s
        self._busy_device_s += passed_s * self._busy
        self._up_device_s += passed_s * before.layout.num_devices
        if len(actions.started) or len(actions.stopped):
            held = state.type_of_device[state.holders[:, 0] >= 0]
            self._busy = np.bincount(held, minlength=state.num_types).astype(float)
            self._start_s[actions.started[actions.started_attempt == 1]] = state.time_s
            self._num_starts += len(actions.started)
            self._num_preemptions += int((actions.stopped_reason <= MOVED).sum())
        if self._spans is not None and (len(actions.started) or len(actions.stopped)):
            self._spans.note(state)
        if state.round_number != before.round_number:
            self._samples.append((state.time_s, *self._busy_device_s.tolist()))

    def note_ends(
        self, before: FleetState, state: FleetState, ended: tuple[int, ...], *, is_finish: bool
    ) -> None:
        """Record the final figures of jobs that ended."""
        for number in ended:
            at = before.row_of(number)
            row = before.jobs.rows[at]
            last_s = (state.time_s - row["counted_s"]) * (row["device_type"] >= 0)
            self._end_s[number] = state.time_s
            self._is_finished[number] = is_finish
            self._held_s[number] = row["held_s"] + last_s
            share = before.jobs.shares[at].sum() + row["pair_share"]
            self._target_s[number] = row["target_s"] + share * (state.time_s - row["counted_s"])

    def finished(
        self, state: FleetState, measured: tuple[int, int], left_out: LongArray, cpu_seconds: float
    ) -> FleetRun:
        """The result of the whole run."""
        samples = np.array([*self._samples, (state.time_s, *self._busy_device_s)])
        # Of several rounds at the same time only the last counts.
        samples = samples[np.diff(samples[:, 0], append=np.inf) > 0.0]
        passed_s = np.diff(samples[:, 0])
        return FleetRun(
            policy=state.rules.policy,
            mechanism=state.rules.mechanism,
            shares_devices=state.pair_table is not None,
            device_types=state.device_types,
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
            num_preemptions=self._num_preemptions,
            simulated_s=state.time_s,
            sample_time_s=samples[:, 0],
            sample_busy=np.diff(samples[:, 1:], axis=0) / passed_s[:, None],
            spans=self._spans.closed(state) if self._spans is not None else None,
            cpu_seconds=cpu_seconds,
        )


class SpanRecorder:
    """Holders of each device over time, up to a limit."""

    def __init__(self, state: FleetState) -> None:
        self._holders = state.holders
        self._since_s = np.zeros(state.holders.shape)
        self._parts: list[tuple[LongArray, LongArray, LongArray, np.ndarray, np.ndarray]] = []
        self._size = 0

    def note(self, state: FleetState) -> None:
        """Close the spans of devices whose holder changed."""
        if len(state.holders) != len(self._holders) or self._size > _MAX_SPANS:
            return
        device, slot = np.nonzero(state.holders != self._holders)
        number = self._holders[device, slot]
        held = number >= 0
        since_s = self._since_s[device, slot][held]
        end_s = np.full(len(since_s), state.time_s)
        self._parts.append((device[held], slot[held], number[held], since_s, end_s))
        self._size += len(since_s)
        self._since_s[device, slot] = state.time_s
        self._holders = state.holders

    def closed(self, state: FleetState) -> HoldSpans:
        """All spans; those that are still open end now."""
        self.note(state.but(holders=np.full_like(state.holders, -1)))
        columns = zip(*self._parts, strict=True) if self._parts else [()] * 5
        device, slot, number, start_s, end_s = (
            np.concatenate(part) if part else np.zeros(0) for part in columns
        )
        return HoldSpans(
            device_names=state.device_names,
            device=device.astype(np.int64),
            is_second=slot.astype(np.int64) == 1,
            number=number.astype(np.int64),
            start_s=start_s,
            end_s=end_s,
        )
