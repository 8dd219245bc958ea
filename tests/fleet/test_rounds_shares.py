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
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Wishes

ROWS = np.array([[4.0, 2.0, 1.0], [3.0, 1.0, 0.0], [2.0, 2.0, 2.0], [6.0, 1.0, 0.5]])


def job_classes(policy: str, kinds_of_job: list[int], num_devices: tuple[int, ...]) -> FleetState:
    kinds = ("a", "b", "c")
    devices = tuple(
        FleetDevice(name=f"{kind}{at}", kind=kind)
        for kind, count in zip(kinds, num_devices, strict=True)
        for at in range(count)
    )
    jobs = tuple(
        Job(
            number=number,
            name="",
            steps_per_s=tuple(ROWS[kind % 4].tolist()),
            gang=1 + kind // 4 % 2,
            weight=1.0 + kind // 8,
        )
        for number, kind in enumerate(kinds_of_job)
    )
    state = new_state(kinds, devices, Rules(policy=policy))
    return step(state, Submit(time_s=0.0, jobs=jobs))[0]


@cache
def ordering() -> Callable[[Jobs, np.ndarray, np.ndarray, Wishes], int]:
    """Gavel's order as Python can call it, sorted."""
    from numba import njit

    from hocket.fleet.rounds.kernels.order import order_by_share, sort_part

    @njit
    def entry(jobs: Jobs, kinds: np.ndarray, largest: np.ndarray, wishes: Wishes) -> int:
        num_parts = order_by_share(jobs, kinds, largest, wishes)
        for part in range(num_parts):
            sort_part(wishes, wishes.parts[part, 0], wishes.parts[part, 1])
        return num_parts

    return cast(Callable[[Jobs, np.ndarray, np.ndarray, Wishes], int], entry)


def new_wishes(num_jobs: int, num_kinds: int) -> Wishes:
    size, none = num_jobs * num_kinds, np.zeros(0, dtype=np.int64)
    return Wishes(
        order=np.empty(size, dtype=np.int64),
        parts=np.empty((2 * num_kinds, 3), dtype=np.int64),
        rank=np.empty(size, dtype=np.int64),
        keys=np.empty((3, size)),
        carried=np.empty((2, size)),
        scratch=np.empty(size, dtype=np.int64),
        is_reserved=np.zeros(num_jobs, dtype=np.bool_),
        is_kept=np.zeros(num_jobs, dtype=np.bool_),
        is_withdrawn=np.zeros(size, dtype=np.bool_),
        pairs=none.reshape(0, 3),
        queue=none,
        queue_at=none.reshape(0, 2),
    )


@given(seed=st.integers(0, 2**32 - 1), num_jobs=st.integers(1, 60))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_gavels_order_is_that_of_a_sort_by_three_keys(seed: int, num_jobs: int) -> None:
    random = np.random.default_rng(seed)
    state = job_classes("las", random.integers(0, 4, num_jobs).tolist(), (2, 2, 2))
    jobs = state.jobs
    jobs.shares[:] = random.integers(0, 3, jobs.shares.shape) / 4.0
    jobs.received_s[:] = random.integers(1, 3, jobs.shares.shape) * 360.0
    jobs.credit_s[:] = random.integers(-2, 3, jobs.shares.shape) * 1e-3
    wishes, kinds = new_wishes(num_jobs, 3), random.permutation(3)
    num_parts = ordering()(jobs, kinds, state.layout.largest_server, wishes)
    parts = wishes.parts[:num_parts].tolist()
    order = [int(wish) for start, stop, _ in parts for wish in wishes.order[start:stop]]
    expected = []
    for kind in kinds.tolist():
        share = jobs.shares[:, kind]
        keys = (-share, -np.round(jobs.credit_s[:, kind], 3), -share / jobs.received_s[:, kind])
        rows = np.lexsort(keys)
        expected += [3 * row + kind for row in rows.tolist() if jobs.steps_per_s[row, kind] > 0.0]
    assert order == expected


def test_work_done_is_counted_in_the_time_that_an_equal_part_would_have_taken() -> None:
    """Two jobs on one device: an equal part of it is half of the time."""
    jobs = tuple(
        Job(number=number, name="", steps_per_s=(speed,), total_steps=1e6)
        for number, speed in enumerate((1.0, 5.0))
    )
    rules = Rules(policy="finish-time-fairness", slack_rounds=0.0)
    state = new_state(("a",), (FleetDevice(name="a0", kind="a"),), rules)
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    for _ in range(20):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    rows = state.jobs.rows
    assert rows["isolated_steps"].min() > 0.0
    assert rows["isolated_s"] == pytest.approx(rows["isolated_steps"] / [0.5, 2.5])
    assert rows["isolated_steps"] == pytest.approx(rows["done_steps"])
