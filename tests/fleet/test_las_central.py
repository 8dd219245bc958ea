"""Max-min fairness as Gavel's solver answers it: the lowest job of `las`, and no further."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.fleet.policies.las import las
from hocket.fleet.policies.las_central import las_central, las_central_agnostic
from hocket.fleet.rounds import FleetDevice, Job, Rules, Submit, Tick, new_state, step

from .snapshots import make_snapshot, random_snapshot


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_central_answer_has_the_lowest_job_of_las_within_all_limits(seed: int) -> None:
    snapshot = random_snapshot(seed)
    best, central = las(snapshot), las_central(snapshot)
    assert central.objective == pytest.approx(best.objective, rel=1e-6)
    assert central.objective <= central.bound * (1.0 + 1e-7)
    assert central.gap < 1e-6
    assert (central.shares >= 0.0).all()
    assert central.shares.sum(axis=1).max() <= 1.0 + 1e-7
    assert (snapshot.gang @ central.shares <= snapshot.num_devices * (1.0 + 1e-7)).all()


def _reference(rates: np.ndarray, gang: np.ndarray, num_devices: np.ndarray) -> np.ndarray:
    """The same path over all jobs, with dense matrices and without classes."""
    num_jobs, num_kinds = rates.shape
    size = num_jobs * num_kinds
    of_job = np.repeat(np.eye(num_jobs), num_kinds, axis=1)
    of_kind = np.tile(np.eye(num_kinds), num_jobs) * np.repeat(gang, num_kinds)
    rows = np.vstack([-np.eye(size), -of_job * rates.ravel(), of_job, of_kind])
    level = np.concatenate([np.zeros(size), np.ones(num_jobs), np.zeros(num_jobs + num_kinds)])
    matrix = np.column_stack([rows, level])
    limit = np.concatenate([np.zeros(size + num_jobs), np.ones(num_jobs), num_devices])
    cost, unit = -np.eye(size + 1)[-1], np.ones(size + 1)
    for _ in range(3):
        by_row, by_column = np.abs(matrix).max(axis=1) ** -0.5, np.abs(matrix).max(axis=0) ** -0.5
        matrix, limit = by_row[:, None] * matrix * by_column, limit * by_row
        cost, unit = cost * by_column, unit * by_column
    point = np.linalg.lstsq(matrix, limit, rcond=None)[0]
    left, dual = limit - matrix @ point, matrix @ np.linalg.solve(matrix.T @ matrix, -cost)
    left, dual = (v if v.min() > 0.0 else v + 1.0 - v.min() for v in (left, dual))
    scale = rest = 1.0
    for _ in range(60):
        unpaid = -matrix.T @ dual - cost * scale
        lacking = left + matrix @ point - limit * scale
        lack = rest + cost @ point + limit @ dual
        middle = (left @ dual + rest * scale) / (len(limit) + 1)
        worst = max(np.abs(lacking).max(), np.abs(unpaid).max())
        if left @ dual <= 1e-8 * scale**2 and worst <= 1e-8 * scale:
            break
        ratio = left / dual
        inverse = np.linalg.inv(matrix.T @ (matrix / ratio[:, None]))

        def solve(to, wanted, inverse=inverse, ratio=ratio):  # type: ignore[no-untyped-def]
            move = inverse @ (to + matrix.T @ (wanted / ratio))
            return move, (matrix @ move - wanted) / ratio

        once, dual_once = solve(-cost, limit)
        goal, rest_goal, part = -left * dual, -rest * scale, 1.0
        for is_last in (False, True):
            move, dual_move = solve(part * unpaid, -part * lacking - goal / dual)
            gained = part * lack + rest_goal / scale + cost @ move + limit @ dual_move
            more = gained / (rest / scale - cost @ once - limit @ dual_once)
            move, dual_move = move + more * once, dual_move + more * dual_once
            left_move, less = (goal - left * dual_move) / dual, (rest_goal - rest * more) / scale
            values = np.concatenate([left, dual, [scale, rest]])
            moves = np.concatenate([left_move, dual_move, [more, less]])
            far = float((-values[moves < 0] / moves[moves < 0]).min(initial=1e9))
            if not is_last:
                centring = max((1.0 - min(1.0, far)) ** 3, 1e-4)
                goal = goal + centring * middle - left_move * dual_move
                rest_goal, part = rest_goal + centring * middle - more * less, 1.0 - centring
        far = min(0.99 * far, 0.999)
        point, left, dual = point + far * move, left + far * left_move, dual + far * dual_move
        scale, rest = scale + far * more, rest + far * less
    return (point * unit / scale)[:-1].reshape(rates.shape)


@pytest.mark.parametrize("seed", range(4))
def test_classes_end_where_a_dense_solver_of_all_jobs_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = random.integers(0, 4, 12)
    steps_per_s, gang = random.uniform(0.2, 3.0, (4, 3))[kinds], np.array([1, 1, 2, 4])[kinds]
    snapshot = make_snapshot(steps_per_s, [6, 6, 6], gang=gang)
    rates = steps_per_s * gang[:, None] / steps_per_s.mean(axis=1, keepdims=True)
    expected = _reference(rates, gang.astype(float), np.array([6.0, 6.0, 6.0]))
    assert las_central(snapshot).shares == pytest.approx(expected, abs=2e-4)


def test_a_job_at_its_cap_stops_the_level_for_gangs() -> None:
    """`las` lets the gang run all the time on fast devices; Gavel's answer leaves it slow ones."""
    steps_per_s = np.array([[1.0, 1.0, 1.0], [4.0, 2.0, 1.0]])
    snapshot = make_snapshot(steps_per_s, [4, 4, 4], gang=[1, 4])
    rates = steps_per_s[1] * 4.0 / steps_per_s[1].mean()
    best, central = (float(rates @ policy(snapshot).shares[1]) for policy in (las, las_central))
    assert best == pytest.approx(rates[0])
    assert 1.0 < central < 0.9 * best
    assert las_central(snapshot).shares[1, 2] > 0.1


@pytest.mark.parametrize(("num_jobs", "devices"), [(4, [2, 2]), (13, [7, 7]), (15, [5, 6, 5])])
def test_jobs_that_just_fit_have_all_their_time(num_jobs: int, devices: list[int]) -> None:
    """Little is left inside: rounding must say neither where the path starts nor where it ends."""
    answer = las_central(make_snapshot(np.ones((num_jobs, len(devices))), devices))
    assert answer.shares.sum(axis=1) == pytest.approx(np.ones(num_jobs), abs=1e-6)
    assert (answer.shares.sum(axis=0) <= np.array(devices) * (1.0 + 1e-7)).all()
    assert answer.gap < 1e-6


def test_agnostic_answer_treats_kinds_of_the_same_size_alike() -> None:
    steps_per_s = np.random.default_rng(0).uniform(0.5, 5.0, (9, 3))
    snapshot = make_snapshot(steps_per_s, [4, 4, 4], gang=[1, 2, 4] * 3)
    shares = las_central_agnostic(snapshot).shares
    assert shares == pytest.approx(np.repeat(shares.mean(axis=1)[:, None], 3, axis=1), abs=1e-6)


@pytest.mark.parametrize("num_alike", [1, 12])
def test_gavel_rounds_hold_the_central_shares_whether_or_not_jobs_are_alike(num_alike: int) -> None:
    """With classes the program is kept, without it is made anew: the shares are the same."""
    kinds, speeds = ("a", "b", "c"), np.random.default_rng(1).uniform(0.5, 5.0, (36, 3))
    devices = tuple(FleetDevice(name=f"{kind}{i}", kind=kind) for kind in kinds for i in range(4))
    steps_per_s, gang = speeds[np.arange(36) // num_alike], [1, 2, 4] * 12
    jobs = tuple(
        Job(
            number=one,
            name=str(one),
            steps_per_s=tuple(steps_per_s[one].tolist()),
            total_steps=1e9,
            gang=gang[one],
        )
        for one in range(36)
    )
    state = new_state(kinds, devices, Rules(mechanism="gavel", policy="las"))
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    state, _ = step(state, Tick(time_s=0.0))
    expected = las_central(make_snapshot(steps_per_s, [4, 4, 4], gang=gang)).shares
    assert state.jobs.shares == pytest.approx(expected, abs=2e-6)
