"""Orders of wishes against numpy's sorting."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, Submit, Tick, new_state, step
from hocket.fleet.rounds.assign import _parameters, speeds_of
from hocket.fleet.rounds.tables import NO_PAIRS, Round, new_round

ROWS = np.array([[4.0, 2.0, 1.0], [3.0, 1.0, 0.0], [2.0, 2.0, 2.0], [6.0, 1.0, 0.5]])


def job_classes(policy: str, types_of_job: list[int], num_devices: tuple[int, ...]) -> FleetState:
    device_types = ("a", "b", "c")
    devices = tuple(
        FleetDevice(name=f"{device_type}{at}", device_type=device_type)
        for device_type, count in zip(device_types, num_devices, strict=True)
        for at in range(count)
    )
    jobs = tuple(
        Job(
            number=number,
            name="",
            steps_per_s=tuple(ROWS[device_type % 4].tolist()),
            gang=1 + device_type // 4 % 2,
            weight=1.0 + device_type // 8,
        )
        for number, device_type in enumerate(types_of_job)
    )
    state = new_state(device_types, devices, Rules(policy=policy))
    return step(state, Submit(time_s=0.0, jobs=jobs))[0]


@cache
def ordering() -> Callable[[Round], int]:
    """Gavel's order as Python can call it, sorted."""
    from numba import njit

    from hocket.fleet.rounds.kernels.wishes import order_by_share, sort_part

    @njit
    def entry(r: Round) -> int:
        num_parts = order_by_share(r)
        for part in range(num_parts):
            sort_part(r, r.parts[part, 0], r.parts[part, 1])
        return num_parts

    return cast(Callable[[Round], int], entry)


@given(seed=st.integers(0, 2**32 - 1), num_jobs=st.integers(1, 60))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_gavels_order_is_that_of_a_sort_by_three_keys(seed: int, num_jobs: int) -> None:
    random = np.random.default_rng(seed)
    state = job_classes("las", random.integers(0, 4, num_jobs).tolist(), (2, 2, 2))
    jobs = state.jobs
    jobs.shares[:] = random.integers(0, 3, jobs.shares.shape) / 4.0
    jobs.received_s[:] = random.integers(1, 3, jobs.shares.shape) * 360.0
    jobs.credit_s[:] = random.integers(-2, 3, jobs.shares.shape) * 1e-3
    device_types = random.permutation(3)
    parameters, speeds = _parameters(Rules(), False, False, False), speeds_of(state)
    asked = NO_PAIRS._replace(device_types=device_types)
    r = new_round(0.0, jobs, asked, parameters, speeds, state.layout, state.holders)
    num_parts = ordering()(r)
    parts = r.parts[:num_parts].tolist()
    order = [int(wish) for start, stop, _ in parts for wish in r.order[start:stop]]
    expected = []
    for device_type in device_types.tolist():
        share = jobs.shares[:, device_type]
        keys = (
            -share,
            -np.round(jobs.credit_s[:, device_type], 3),
            -share / jobs.received_s[:, device_type],
        )
        rows = np.lexsort(keys)
        expected += [
            3 * row + device_type
            for row in rows.tolist()
            if jobs.steps_per_s[row, device_type] > 0.0
        ]
    assert order == expected


def test_work_done_is_counted_in_the_time_that_an_equal_part_would_have_taken() -> None:
    """Two jobs on one device: an equal part of it is half of the time."""
    jobs = tuple(
        Job(number=number, name="", steps_per_s=(speed,), total_steps=1e6)
        for number, speed in enumerate((1.0, 5.0))
    )
    rules = Rules(policy="finish-time-fairness", slack_rounds=0.0)
    state = new_state(("a",), (FleetDevice(name="a0", device_type="a"),), rules)
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    for _ in range(20):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    rows = state.jobs.rows
    assert rows["isolated_steps"].min() > 0.0
    assert rows["isolated_s"] == pytest.approx(rows["isolated_steps"] / [0.5, 2.5])
    assert rows["isolated_steps"] == pytest.approx(rows["done_steps"])
