"""A small fleet of two device types, its jobs, and some rounds of it."""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, Submit, Tick, new_state, step

NO_SLACK = Rules(slack_rounds=0.0, stickiness_rounds=0.0)


def fleet(num_fast: int, num_slow: int = 0, rules: Rules = NO_SLACK) -> FleetState:
    devices = [
        FleetDevice(name=f"fast{i}", device_type="fast", server=f"f{i // 4}")
        for i in range(num_fast)
    ]
    devices += [
        FleetDevice(name=f"slow{i}", device_type="slow", server=f"s{i // 4}")
        for i in range(num_slow)
    ]
    return new_state(("fast", "slow"), tuple(devices), rules)


def job(
    number: int, fast: float = 2.0, slow: float = 1.0, steps: float = 1e6, **more: object
) -> Job:
    return Job(number=number, name=str(number), steps_per_s=(fast, slow), total_steps=steps, **more)  # type: ignore[arg-type]


def submit(state: FleetState, *jobs: Job) -> FleetState:
    return step(state, Submit(time_s=state.time_s, jobs=jobs))[0]


def held_s(state: FleetState, rounds: int) -> np.ndarray:
    for _ in range(rounds):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    return np.asarray(state.jobs.rows["held_s"])
