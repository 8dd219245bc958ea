"""Run a trace on simulated devices.

Arrivals, ends of jobs, rounds and faults are passed to ``step`` in order of time; the end of a job
follows from its rate. O(events x jobs that have not ended), in microseconds each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.fleet.gangs import GangSpeeds
from hocket.fleet.rounds.actions import GIVEN_UP, Actions
from hocket.fleet.rounds.events import Event, Fail, Finish, Submit, Tick
from hocket.fleet.rounds.state import FleetDevice, FleetState, Job, PairTable, Rules, new_state
from hocket.fleet.rounds.step import step
from hocket.fleet.simulator.bind import TraceWork
from hocket.fleet.simulator.elastic import Elastic
from hocket.fleet.simulator.fleet_run import FleetRun
from hocket.fleet.simulator.record import FleetRecorder

# Kernels are loaded (or compiled, at the first use) before a run is timed.


@lru_cache(maxsize=64)
def load_compiled(policy: str, mechanism: str, num_types: int, shares_devices: bool) -> None:
    """Simulate one job on one device, so that all kernels are compiled before a run is timed."""
    from hocket.fleet.rounds.kernels.count import first_to_finish

    beside = PairTable(steps_per_s=np.zeros((1, 1, num_types))) if shares_devices else None
    rules, device = (
        Rules(policy=policy, mechanism=mechanism),
        FleetDevice(name="one", device_type="0"),
    )
    device_types = tuple(map(str, range(num_types)))
    state = new_state(device_types, (device,), rules, pair_table=beside)
    job = Job(number=0, name="", steps_per_s=(1.0,) * num_types, total_steps=1.0)
    state, _ = step(state, Submit(time_s=0.0, jobs=(job,)))
    first_to_finish(state.jobs)
    step(state, Finish(time_s=1.0, numbers=(0,)))


_MAX_ROUNDS = 2e7
"""About ten minutes of simulation with few jobs."""
# Called with the number of ended jobs and the number of all jobs.
OnProgress = Callable[[int, int], None]


class Faults(Protocol):
    """Source of events that disturb a fleet, such as devices that break and jobs that crash."""

    next_s: float
    """Time of the next one."""

    def take(self, state: FleetState) -> Event:
        """The event of that moment."""


def simulate(
    work: TraceWork,
    devices: tuple[FleetDevice, ...],
    rules: Rules | None = None,
    *,
    shares_devices: bool = False,
    price_per_hour: FloatArray | None = None,
    measured: tuple[int, int] | None = None,
    faults: Faults | None = None,
    elastic: Sequence[GangSpeeds] | None = None,
    records_spans: bool = False,
    on_progress: OnProgress | None = None,
    check: Callable[[FleetState, Event, Actions], None] | None = None,
) -> FleetRun:
    """Run the jobs of a trace; ends when those ``measured`` (first, end) have ended.

    ``elastic`` says what each job does with every number of devices; without it each has those that
    the trace says. ``faults`` are further events. ``check`` is called after every step.
    """
    rules = rules or Rules()
    load_compiled(rules.policy, rules.mechanism, len(work.device_types), shares_devices)
    start_s = time.process_time()
    state = new_state(
        work.device_types,
        devices,
        rules,
        price_per_hour=price_per_hour,
        pair_table=PairTable(steps_per_s=work.beside) if shares_devices else None,
    )
    # Every user of a trace has the same weight.
    users = tuple(dict.fromkeys(work.trace.users)) or ("",)
    state = state.but(users=users, user_weight=np.ones(len(users)))
    first, end = measured or (0, len(work.trace))
    if not 0 <= first < end <= len(work.trace):
        raise UsageError(f"jobs {first} to {end} are not in a trace of {len(work.trace)} jobs")
    sizer = None if elastic is None else Elastic(elastic, work.total_steps)
    can_run = _can_run(work, state) if elastic is None else _can_begin(elastic, state)
    recorder = FleetRecorder(work, state, records_spans)
    knows_servers = _knows_servers(state) and sizer is None
    feed = _Feed(work, can_run, faults, knows_servers, sizer)
    num_left = int(can_run[first:end].sum())
    if num_left == 0:
        raise NoFeasiblePlanError(
            "no job of the trace fits the cluster", hint="give more devices to --cluster"
        )
    _refuse_endless(work, can_run, state, first, end)
    total = num_left
    while num_left > 0:
        event, ended = feed.next_event(state)
        if sizer is not None and isinstance(event, Tick):
            resize = sizer.resize(state, event.time_s)
            if resize is not None:
                before = state
                state, actions = step(state, resize)
                recorder.note(before, state, actions)
        before = state
        state, actions = step(state, event)
        if isinstance(event, Fail):
            ended = _given_up(actions)
        recorder.note(before, state, actions)
        if ended:
            recorder.note_ends(before, state, ended, is_finish=isinstance(event, Finish))
            num_left -= sum(first <= number < end for number in ended)
        if check is not None:
            check(state, event, actions)
        if on_progress is not None and ended:
            on_progress(total - num_left, total)
    return recorder.finished(
        state, (first, end), np.flatnonzero(~can_run), time.process_time() - start_s
    )


def _refuse_endless(
    work: TraceWork, can_run: BoolArray, state: FleetState, first: int, end: int
) -> None:
    """Raise `UsageError` for work that takes more rounds than can be simulated."""
    some = np.flatnonzero(can_run[first:end]) + first
    best = np.maximum(work.steps_per_s[some].max(axis=1), 1e-300)
    alone_s = work.total_steps[some] / best
    device_s = float((alone_s * work.trace.gang[some]).sum()) / int(state.num_devices.sum())
    rounds = max(float(alone_s.max()), device_s) / state.rules.round_s
    if rounds > _MAX_ROUNDS:
        raise UsageError(
            f"these jobs take at least {rounds:.2g} rounds of {state.rules.round_s:g} s; a "
            f"simulation has at most {_MAX_ROUNDS:.2g}",
            hint="give longer rounds (--round), more devices, or check the lengths of the jobs",
        )


def _can_run(work: TraceWork, state: FleetState) -> BoolArray:
    fits = work.trace.gang[:, None] <= state.num_devices[None, :]
    return np.asarray(((work.steps_per_s > 0.0) & fits).any(axis=1))


def _can_begin(elastic: Sequence[GangSpeeds], state: FleetState) -> BoolArray:
    return np.array([bool(speeds.on(state.num_devices).any()) for speeds in elastic])


def _knows_servers(state: FleetState) -> bool:
    """True if any server has several devices; Gavel's rounds ignore servers."""
    return state.rules.mechanism != "gavel" and bool((state.layout.largest_server > 1).any())


def _given_up(actions: Actions) -> tuple[int, ...]:
    """Jobs that failed too often."""
    return tuple(actions.stopped[actions.stopped_reason == GIVEN_UP].tolist())


class _Feed:
    """Events in order of time: jobs that end, jobs that come, faults, rounds."""

    def __init__(
        self,
        work: TraceWork,
        can_run: BoolArray,
        faults: Faults | None,
        knows_servers: bool,
        sizer: Elastic | None = None,
    ) -> None:
        from hocket.fleet.rounds.kernels.count import first_to_finish

        self._work, self._faults, self._knows_servers = work, faults, knows_servers
        self._first_to_finish = first_to_finish
        self._coming = np.flatnonzero(can_run).tolist()
        self._arrival_s = [*work.trace.arrival_s[can_run].tolist(), math.inf]
        self._at, self._sizer = 0, sizer

    def next_event(self, state: FleetState) -> tuple[Event, tuple[int, ...]]:
        """The next event, and the jobs that finish by it."""
        end_s, row = self._first_to_finish(state.jobs)
        arrival_s = self._arrival_s[self._at]
        fault_s = math.inf if self._faults is None else self._faults.next_s
        time_s = min(end_s, arrival_s, fault_s, state.next_tick_s)
        if not math.isfinite(time_s):
            raise NoFeasiblePlanError("jobs wait that can never run", hint="check the policy")
        # Ends come before arrivals at the same time, so that their devices are free for the
        # arriving jobs.
        if end_s == time_s:
            number = int(state.jobs.rows["number"][row])
            return Finish(time_s=max(end_s, state.time_s), numbers=(number,)), (number,)
        if arrival_s == time_s:
            return self._submit(state), ()
        if self._faults is not None and fault_s == time_s:
            return self._faults.take(state), ()
        return Tick(time_s=time_s), ()

    def _submit(self, state: FleetState) -> Submit:
        number, arrival_s = self._coming[self._at], self._arrival_s[self._at]
        work, trace = self._work, self._work.trace
        self._at += 1
        spread = tuple(work.spread_steps_per_s[number].tolist()) if self._knows_servers else None
        job = Job(
            number=number,
            name=trace.names[number],
            steps_per_s=tuple(work.steps_per_s[number].tolist()),
            total_steps=float(work.total_steps[number]),
            gang=int(trace.gang[number]),
            weight=float(trace.weight[number]),
            deadline_s=arrival_s + float(trace.slo_s[number]),
            profile=int(work.profile[number]),
            spread_steps_per_s=spread,
            user=state.users.index(trace.users[number]) if trace.users else 0,
        )
        if self._sizer is not None:
            size = self._sizer.begin(state, number)
            job = replace(job, gang=size.gang, steps_per_s=size.steps_per_s, profile=-1)
        return Submit(time_s=arrival_s, jobs=(job,))
