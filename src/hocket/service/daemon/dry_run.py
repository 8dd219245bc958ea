"""Dry runs of decisions, to refuse jobs that the policy cannot serve and to compile kernels early.

Some policies cannot serve every job; for example, policies that use the remaining work must know
it. `step` detects this when a round begins, which may be long after the job was accepted, and then
no round could begin any more. So a job is refused if a fleet with only this job cannot begin a
round. A service does not start if its stored jobs do not suit its policy.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hocket.base.errors import UsageError
from hocket.fleet.rounds.events import (
    Event,
    Fail,
    Finish,
    Progress,
    Submit,
    Tick,
)
from hocket.fleet.rounds.state import FleetDevice, FleetState, Job, Jobs, Rules, new_state
from hocket.fleet.rounds.step import step


def dry_run_job(state: FleetState, job: Job) -> None:
    """Raise `UsageError` if the state's policy cannot serve a job."""
    kind_of_job = (job.gang > 1, math.isfinite(job.total_steps), math.isfinite(job.deadline_s))
    try:
        _dry_run_like(state.rules, *kind_of_job)
    except UsageError:
        # Repeated with the job itself, so that the message contains its number and devices.
        step(_emptied(state), Submit(time_s=state.time_s, jobs=(job,)))


@lru_cache(maxsize=64)
def _dry_run_like(rules: Rules, is_gang: bool, knows_steps: bool, has_deadline: bool) -> None:
    """Check one job that represents all jobs with these properties; a success is cached."""
    devices = (FleetDevice(name="a", device_type=""), FleetDevice(name="b", device_type=""))
    job = Job(
        number=1,
        name="",
        steps_per_s=(1.0,),
        gang=2 if is_gang else 1,
        total_steps=1.0 if knows_steps else math.inf,
        deadline_s=1.0 if has_deadline else math.inf,
    )
    step(new_state(("",), devices, rules), Submit(time_s=0.0, jobs=(job,)))


def dry_run_round(state: FleetState) -> None:
    """Raise `UsageError` if the state's policy cannot serve its jobs."""
    due = state.but(next_tick_s=state.time_s, solved_s=-np.inf, is_dirty=True, warm=None)
    step(due, Tick(time_s=state.time_s))


@lru_cache(maxsize=8)
def dry_run_day(rules: Rules, device_types: tuple[str, ...]) -> None:
    """Simulate some rounds of a small fleet, to load or compile all kernels that `step` calls.

    Otherwise the first users would wait for compilation, and a service that is killed soon after
    each start would never finish it.
    """
    devices = tuple(
        FleetDevice(
            name=f"{device_type}-{index}",
            device_type=device_type,
            server=f"{device_type}-{index // 2}",
        )
        for device_type in device_types
        for index in range(4)
    )
    jobs = _some_jobs(rules, len(device_types))
    state, _ = step(new_state(device_types, devices, rules), Submit(time_s=0.0, jobs=jobs))
    one, two = np.unique(state.holders[state.holders >= 0]).tolist()[:2]
    events: tuple[Event, ...] = (
        Progress(time_s=1.0, number=one, attempt=1, done_steps=5.0, saved_steps=5.0),
        Fail(time_s=2.0, number=one, attempt=1),
        Finish(time_s=3.0, numbers=(two,)),
    )
    for event in events:
        state, _ = step(state, event)
    for _ in range(3):
        state, _ = step(state, Tick(time_s=max(state.next_tick_s, state.time_s)))


def _some_jobs(rules: Rules, num_types: int) -> tuple[Job, ...]:
    """More jobs than devices, each with different speeds, and gangs if the policy supports them."""
    largest = 2
    try:
        _dry_run_like(rules, is_gang=True, knows_steps=True, has_deadline=False)
    except UsageError:
        largest = 1
    return tuple(
        Job(
            number=number,
            name="",
            steps_per_s=tuple(1.0 + number * device_type % 3 for device_type in range(num_types)),
            total_steps=1e6,
            gang=1 + number % largest,
        )
        for number in range(1, 7 * num_types)
    )


def _emptied(state: FleetState) -> FleetState:
    """The same fleet without jobs, in which a round begins as soon as a job arrives."""
    return state.but(
        jobs=Jobs(*(column[:0] for column in state.jobs)),
        names={},
        holders=np.full(state.holders.shape, -1),
        next_tick_s=np.inf,
        solved_s=-np.inf,
        warm=None,
    )
