"""Shares by class against the policy itself, and orders of wishes against numpy's sorting."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.fleet.policies import find_policy
from hocket.fleet.rounds import Device, Job, Rules, State, Submit, new_state, step
from hocket.fleet.rounds.class_shares import _group, _tables, class_shares
from hocket.fleet.rounds.share import to_market
from hocket.fleet.rounds.tables import Wishes, new_wishes

ROWS = np.array([[4.0, 2.0, 1.0], [3.0, 1.0, 0.0], [2.0, 2.0, 2.0], [6.0, 1.0, 0.5]])


def crowd(policy: str, kinds_of_job: list[int], num_devices: tuple[int, ...]) -> State:
    kinds = ("a", "b", "c")
    devices = tuple(
        Device(name=f"{kind}{at}", kind=kind)
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


def asked(state: State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = state.jobs.rows
    return state.jobs.steps_per_s, rows["gang"].copy(), rows["weight"].copy()


@pytest.mark.parametrize("policy", ["las", "las-agnostic"])
@given(
    kinds_of_job=st.lists(st.integers(0, 15), min_size=1, max_size=40),
    num_devices=st.tuples(*[st.integers(2, 6)] * 3),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_shares_by_class_are_those_of_the_policy(
    policy: str, kinds_of_job: list[int], num_devices: tuple[int, ...]
) -> None:
    state = crowd(policy, kinds_of_job, num_devices).but(warm=None)
    answer = class_shares(state, *asked(state))
    assert answer is not None
    expected = find_policy(policy)(to_market(state, state.jobs.steps_per_s, state.jobs.rows))
    seen = state.jobs.steps_per_s if policy == "las" else (state.jobs.steps_per_s > 0.0)
    mine, theirs = (seen * answer[0]).sum(axis=1), (seen * expected.shares).sum(axis=1)
    assert mine == pytest.approx(theirs, rel=2e-6)
    used = (answer[0] * state.jobs.rows["gang"][:, None]).sum(axis=0)
    assert (used <= np.array(num_devices) * (1 + 1e-9)).all()
    assert (answer[0].sum(axis=1) <= 1 + 1e-9).all()


def test_what_was_asked_before_does_not_show_in_shares() -> None:
    state = crowd("las", [0, 1, 2, 3, 1, 1, 5, 9, 4] * 3, (3, 4, 2))
    _tables.cache_clear()
    cold = class_shares(state, *asked(state))
    other = crowd("las", [5, 9, 9, 12, 3, 3], (3, 4, 2))
    class_shares(other, *asked(other))
    warm = class_shares(state, *asked(state))
    assert cold is not None
    assert warm is not None
    assert np.array_equal(cold[0], warm[0])


def arrays_of(value: object) -> list[bytes]:
    """The contents of all arrays in nested tuples and dataclasses."""
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    if isinstance(value, tuple):
        return [content for part in value for content in arrays_of(part)]
    return arrays_of(tuple(vars(value).values())) if hasattr(value, "__dict__") else []


def test_tables_that_are_kept_are_never_written_to() -> None:
    state = crowd("las", [0, 1, 2, 3, 1, 1, 5, 9, 4] * 3, (3, 4, 2))
    groups = _group(np.column_stack(asked(state)))
    assert groups is not None
    kept = _tables(groups.key, (3, 4, 2))
    before = arrays_of(kept)
    assert len(before) > 10
    for kinds_of_job in ([0, 1, 2, 3, 5, 9, 4] * 5, [0, 1, 2, 3, 5, 9, 4, 4, 4]):
        other = crowd("las", kinds_of_job, (3, 4, 2))
        again = _group(np.column_stack(asked(other)))
        assert again is not None
        assert again.key == groups.key
        class_shares(other, *asked(other))
    assert _tables(groups.key, (3, 4, 2)) is kept
    assert arrays_of(kept) == before


def test_nearly_equal_classes_are_left_to_the_policy() -> None:
    state = crowd("las", [0, 0, 1, 1, 2, 2, 2, 2], (3, 4, 2))
    steps_per_s, gang, weight = asked(state)
    steps_per_s = steps_per_s.copy()
    steps_per_s[0] *= 1.0 + 1e-10
    assert class_shares(state, steps_per_s, gang, weight) is None
    assert class_shares(state.but(rules=Rules(policy="fifo")), *asked(state)) is None


@cache
def sorting() -> Callable[[Wishes, int, int], None]:
    """The sort as Python can call it."""
    from numba import njit

    from hocket.fleet.rounds.kernels.order import sort_part

    @njit
    def entry(wishes: Wishes, start: int, stop: int) -> None:
        sort_part(wishes, start, stop)

    return cast(Callable[[Wishes, int, int], None], entry)


@given(seed=st.integers(0, 2**32 - 1), num_jobs=st.integers(1, 60))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_gavels_order_is_that_of_a_sort_by_three_keys(seed: int, num_jobs: int) -> None:
    from hocket.fleet.rounds.kernels.order import order_by_share

    entry = sorting()
    random = np.random.default_rng(seed)
    state = crowd("las", random.integers(0, 4, num_jobs).tolist(), (2, 2, 2))
    jobs = state.jobs
    jobs.shares[:] = random.integers(0, 3, jobs.shares.shape) / 4.0
    jobs.received_s[:] = random.integers(1, 3, jobs.shares.shape) * 360.0
    jobs.credit_s[:] = random.integers(-2, 3, jobs.shares.shape) * 1e-3
    none = np.zeros(0, dtype=np.int64)
    wishes = new_wishes(num_jobs, 3, none.reshape(0, 3), none, none.reshape(0, 2))
    kinds = random.permutation(3)
    num_parts = order_by_share(jobs, kinds, state.layout.largest_server, wishes)
    parts = wishes.parts[:num_parts].tolist()
    for start, stop, _ in parts:
        entry(wishes, start, stop)
    order = [int(wish) for start, stop, _ in parts for wish in wishes.order[start:stop]]
    expected = []
    for kind in kinds.tolist():
        share = jobs.shares[:, kind]
        keys = (-share, -np.round(jobs.credit_s[:, kind], 3), -share / jobs.received_s[:, kind])
        rows = np.lexsort(keys)
        expected += [3 * row + kind for row in rows.tolist() if jobs.steps_per_s[row, kind] > 0.0]
    assert order == expected
