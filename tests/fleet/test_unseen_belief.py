"""Hope for device types that were not tried: it ends, and it finds what a low estimate hides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import UsageError
from hocket.fleet.rounds import FleetDevice, Job, Submit, Tick, new_state, step
from hocket.fleet.throughputs import JobProfile, Throughputs
from hocket.fleet.throughputs.unseen import Belief, Expected, belief_from

DEVICE_TYPES = ("fast", "slow")


def belief(likely: tuple[float, float], deviation: tuple[float, float]) -> Belief:
    logs = Expected(np.log(likely), np.diag(np.square(deviation)))
    return Belief(logs=logs, can_run=np.array([True, True]))


def kinds_held(belief: Belief, truth: dict[str, float], boldness: float, rounds: int) -> list[str]:
    """Where a job is put, round by round, on a fleet with one device of each device type."""
    state = new_state(
        DEVICE_TYPES,
        tuple(
            FleetDevice(name=device_type, device_type=device_type) for device_type in DEVICE_TYPES
        ),
    )
    job = Job(number=0, name="0", steps_per_s=tuple(belief.steps_per_s(boldness).tolist()))
    state, _ = step(state, Submit(time_s=0.0, jobs=(job,)))
    held = []
    for _ in range(rounds):
        (device_type,) = state.devices_of(0)
        held.append(device_type)
        belief = belief.after(DEVICE_TYPES.index(device_type), truth[device_type])
        rows = belief.steps_per_s(boldness)[None, :]
        jobs = state.jobs._replace(steps_per_s=rows, spread_steps_per_s=rows.copy())
        state = state.but(jobs=jobs, is_dirty=True)
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    return held


def test_hope_finds_a_type_that_its_estimate_hides() -> None:
    """The job is thought to do 2 steps where it does 10, and 4 where it does 4."""
    wrong, truth = belief((2.0, 4.0), (1.0, 0.0)), {"fast": 10.0, "slow": 4.0}
    assert set(kinds_held(wrong, truth, 0.0, 40)) == {"slow"}, "without hope it stays for ever"
    bold = kinds_held(wrong, truth, 2.0, 40)
    assert bold.count("slow") <= 8
    assert bold[-20:] == ["fast"] * 20


def test_false_hope_is_given_up_after_a_few_rounds() -> None:
    wrong, truth = belief((2.0, 4.0), (1.0, 0.0)), {"fast": 1.0, "slow": 4.0}
    bold = kinds_held(wrong, truth, 2.0, 40)
    assert 1 <= bold.count("fast") <= 8
    assert bold[-20:] == ["slow"] * 20


def test_hope_costs_nothing_where_all_is_measured() -> None:
    known = belief((2.0, 4.0), (0.0, 0.0))
    assert (known.steps_per_s(3.0) == known.steps_per_s()).all()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    factors=st.lists(st.floats(-2.0, 2.0), min_size=9, max_size=9),
    truth=st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3),
    measured=st.lists(st.integers(0, 2), max_size=30),
)
def test_measuring_narrows_every_type_and_the_variance_falls_with_their_number(
    factors: list[float], truth: list[float], measured: list[int]
) -> None:
    mixing = np.array(factors).reshape(3, 3)
    logs = Expected(np.zeros(3), mixing @ mixing.T + 0.01 * np.eye(3))
    now = Belief(logs=logs, can_run=np.ones(3, dtype=bool))
    for device_type in measured:
        before, now = now, now.after(device_type, truth[device_type])
        assert (now.logs.deviation <= before.logs.deviation + 1e-9).all()
    for device_type in range(3):
        count = measured.count(device_type)
        if count:
            assert now.logs.deviation[device_type] <= 0.05 / np.sqrt(count) + 1e-9
    assert np.linalg.eigvalsh(now.logs.covariance).min() > -1e-9


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    likely=st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
    wrong_by=st.floats(-2.0, 2.0),
    count=st.integers(0, 20),
)
def test_what_is_hoped_for_is_never_below_the_truth_within_the_deviations(
    likely: tuple[float, float], wrong_by: float, count: int
) -> None:
    now = belief(likely, (0.7, 0.0))
    truth = likely[0] * np.exp(0.7 * wrong_by)
    for _ in range(count):
        now = now.after(0, truth)
    assert now.steps_per_s(2.0)[0] >= truth * (1 - 1e-9)


def test_one_measurement_tells_the_level_of_types_that_differ_little() -> None:
    table = Throughputs(
        device_types=DEVICE_TYPES,
        profiles=tuple(JobProfile(f"job {'x' * at}", 1) for at in range(4)),
        alone=np.exp(np.arange(4.0))[:, None] * np.array([[3.0, 1.0]]),
        beside=np.zeros((4, 4, 2)),
    )
    found = belief_from(table, JobProfile("new", 1), {"slow": 5.0})
    assert found.steps_per_s() == pytest.approx([15.0, 5.0], rel=0.05)
    # It was twice as fast as thought on the one, so it is hoped to be faster on the other too.
    level = Expected(np.zeros(2), np.full((2, 2), 10.0) + 0.05 * np.eye(2))
    free = Belief(logs=level, can_run=np.array([True, True])).after(0, 7.8)
    assert free.steps_per_s() == pytest.approx([7.8, 7.8], rel=0.05)


def test_a_type_that_cannot_be_stays_zero_and_nonsense_is_refused() -> None:
    table = Throughputs(
        device_types=DEVICE_TYPES, profiles=(), alone=np.zeros((0, 2)), beside=np.zeros((0, 0, 2))
    )
    found = belief_from(table, JobProfile("new", 1), {"slow": 5.0, "fast": 0.0})
    assert found.steps_per_s(3.0).tolist() == pytest.approx([0.0, 5.0])
    with pytest.raises(UsageError, match="nothing is known"):
        belief_from(table, JobProfile("new", 1), {"fast": 0.0})
    with pytest.raises(UsageError, match="did you mean 'fast'"):
        belief_from(table, JobProfile("new", 1), {"slow": 5.0, "fats": 1.0})
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="no measured number"):
            found.after(1, nonsense)
