"""Policies give the values of plain linear programs with one variable per job and device type."""

from dataclasses import replace

import numpy as np
import pytest
from fleet.snapshots import (
    JOB_COLUMNS,
    PlainProgram,
    late_shared_snapshot,
    random_snapshot,
    shared_snapshots,
    snapshots,
    team_snapshots,
)
from hypothesis import given, settings

from hocket.fleet.policies import POLICIES
from hocket.fleet.policies.normalise import isolated_steps_per_s, proportional_steps_per_s
from hocket.fleet.solve.check import throughputs, verify_allocation

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)
FEWER = settings(derandomize=True, deadline=None, max_examples=15)


def can_run(snapshot):
    return np.flatnonzero(snapshot.usable_steps_per_s.any(axis=1))


def only(snapshot, jobs):
    """The snapshot of some of its jobs; the normalisers must not depend on who is left out."""
    rows = {name: getattr(snapshot, name)[jobs] for name in JOB_COLUMNS}
    return replace(snapshot, ids=tuple(snapshot.ids[job] for job in jobs), **rows)


@given(snapshots)
@SETTINGS
def test_las_reaches_the_level_of_the_plain_program(snapshot):
    snapshot = only(snapshot, can_run(snapshot))
    answer = POLICIES["las"](snapshot)
    verify_allocation(snapshot, answer)
    due = snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang
    expected = PlainProgram(snapshot).highest_level(due)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound >= expected * (1 - 1e-9)
    assert answer.gap <= 1e-7


@given(snapshots)
@SETTINGS
def test_makespan_is_that_of_the_plain_program(snapshot):
    snapshot = only(snapshot, can_run(snapshot))
    answer = POLICIES["makespan"](snapshot)
    verify_allocation(snapshot, answer)
    scale = snapshot.remaining_steps / 1e4
    expected = 1e4 / PlainProgram(snapshot).highest_level(scale)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound <= expected * (1 + 1e-9)
    assert answer.gap <= 1e-7


def bisected_ratio(snapshot) -> float:
    """Finish-time fairness by bisection over plain feasibility programs."""
    isolated = isolated_steps_per_s(snapshot)
    alone_s = snapshot.isolated_s + snapshot.remaining_steps / isolated
    program = PlainProgram(snapshot)
    fastest = snapshot.usable_steps_per_s.max(axis=1)
    low = float(((snapshot.elapsed_s + snapshot.remaining_steps / fastest) / alone_s).max())

    def is_reached(ratio):
        left_s = ratio * alone_s - snapshot.elapsed_s
        needs = snapshot.remaining_steps / left_s
        return program.highest_level(needs / fastest * fastest) >= 1.0 - 1e-9

    if is_reached(low * (1 + 1e-9)):
        return low
    high = 2.0 * low
    while not is_reached(high):
        high *= 2.0
    while high - low > 1e-7 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return high


@given(snapshots)
@FEWER
def test_finish_time_fairness_is_that_of_a_bisection(snapshot):
    snapshot = only(snapshot, can_run(snapshot)[:20])
    answer = POLICIES["finish-time-fairness"](snapshot)
    verify_allocation(snapshot, answer)
    assert answer.objective == pytest.approx(bisected_ratio(snapshot), rel=1e-6)
    assert answer.gap <= 1e-6


@pytest.mark.parametrize("seed", [62, 67, 69, 96, 115, 160])
def test_finish_time_fairness_of_late_jobs_that_share_is_that_of_a_bisection(seed):
    """Demands bend where late jobs reach their top, just where the level is looked for."""
    snapshot = late_shared_snapshot(seed)
    answer = POLICIES["finish-time-fairness"](snapshot)
    verify_allocation(snapshot, answer)
    expected = bisected_ratio(snapshot)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound <= expected * (1 + 1e-9)
    assert answer.gap <= 1e-6
    earlier = replace(snapshot, elapsed_s=0.9 * snapshot.elapsed_s)
    warm = POLICIES["finish-time-fairness"](earlier).warm
    again = POLICIES["finish-time-fairness"](snapshot, warm)
    verify_allocation(snapshot, again)
    assert again.objective == pytest.approx(answer.objective, rel=1e-6)


@given(snapshots)
@SETTINGS
def test_sums_are_those_of_the_plain_program(snapshot):
    weight = snapshot.weight[:, None]
    values = {
        "max-throughput": np.broadcast_to(weight, snapshot.steps_per_s.shape),
        "min-cost": weight / snapshot.price_per_hour[None, :],
    }
    for name, value in values.items():
        answer = POLICIES[name](snapshot)
        verify_allocation(snapshot, answer)
        expected = PlainProgram(snapshot).largest_sum(value)
        assert answer.objective == pytest.approx(expected, rel=1e-6)
        assert answer.bound >= expected * (1 - 1e-9)
        assert answer.gap <= 1e-6


def plain_water_filling(snapshot) -> np.ndarray:
    """Normalised throughputs by freezing, one job at a time, whoever a program cannot raise."""
    due = snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang
    program = PlainProgram(snapshot)
    reached, is_frozen = np.zeros(len(due)), np.zeros(len(due), dtype=bool)
    while not is_frozen.all():
        base = np.where(is_frozen, reached, 0.0) * due * (1 - 1e-9)
        level = program.highest_level(np.where(is_frozen, 0.0, due), base)
        rise = np.full(len(due), np.inf)
        for job in np.flatnonzero(~is_frozen):
            others = np.where(is_frozen, reached, level) * due * (1 - 1e-9)
            others[job] = 0.0
            alone = np.zeros(len(due))
            alone[job] = due[job]
            rise[job] = program.highest_level(alone, others) / level
        stuck = rise <= max(1 + 1e-5, rise.min())
        is_frozen[stuck], reached[stuck] = True, level
    return reached


@pytest.mark.parametrize("seed", range(12))
def test_las_fills_to_the_end_like_a_plain_water_filling(seed):
    snapshot = random_snapshot(seed, max_jobs=9, max_kinds=3)
    snapshot = only(snapshot, can_run(snapshot))
    due = snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang
    answer = POLICIES["las"](snapshot)
    reached = throughputs(snapshot, answer) / due
    np.testing.assert_allclose(reached, plain_water_filling(snapshot), rtol=1e-5)


@given(shared_snapshots)
@FEWER
def test_las_with_sharing_reaches_the_level_of_the_pairwise_program(snapshot):
    answer = POLICIES["las"](snapshot)
    verify_allocation(snapshot, answer)
    due = snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang
    runnable = can_run(snapshot)
    due[np.setdiff1d(np.arange(snapshot.num_jobs), runnable)] = 0.0
    expected = PlainProgram(snapshot).highest_level(due)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.gap <= 2e-6


@given(shared_snapshots)
@FEWER
def test_makespan_and_sums_with_sharing_are_those_of_the_pairwise_program(snapshot):
    program = PlainProgram(snapshot)
    runnable = can_run(snapshot)
    due = np.zeros(snapshot.num_jobs)
    due[runnable] = snapshot.remaining_steps[runnable] / 1e4
    answer = POLICIES["makespan"](snapshot)
    verify_allocation(snapshot, answer)
    assert answer.objective == pytest.approx(1e4 / program.highest_level(due), rel=2e-6)
    answer = POLICIES["max-throughput"](snapshot)
    verify_allocation(snapshot, answer)
    value = np.broadcast_to(snapshot.weight[:, None], snapshot.steps_per_s.shape)
    assert answer.objective == pytest.approx(program.largest_sum(value), rel=1e-6)


@given(team_snapshots)
@FEWER
def test_one_team_fair_inside_is_las(snapshot):
    snapshot = replace(
        snapshot,
        team_of=np.zeros(snapshot.num_jobs, dtype=np.int64),
        teams=("all",),
        team_weight=np.ones(1),
    )
    together, las = POLICIES["hierarchical"](snapshot), POLICIES["las"](snapshot)
    np.testing.assert_allclose(
        throughputs(snapshot, together), throughputs(snapshot, las), rtol=1e-6, atol=1e-9
    )


def test_deadlines_are_kept_by_weight_and_the_rest_is_named():
    snapshot = random_snapshot(3, max_jobs=12, max_kinds=2)
    snapshot = only(snapshot, can_run(snapshot))
    fastest = snapshot.usable_steps_per_s.max(axis=1)
    # Everybody wants to run at full speed all the time, on very few devices.
    snapshot = replace(
        snapshot,
        num_devices=np.full(snapshot.num_types, 4),
        deadline_s=snapshot.remaining_steps / fastest * 1.01,
    )
    answer = POLICIES["min-cost-slo"](snapshot)
    verify_allocation(snapshot, answer)
    reached = throughputs(snapshot, answer)
    is_met = reached >= fastest / 1.01 * (1 - 1e-6)
    dropped = set(answer.notes["deadlines dropped"].split(", "))
    assert dropped == {snapshot.ids[job] for job in np.flatnonzero(~is_met)} - {"none"}
    assert 0 < is_met.sum() < snapshot.num_jobs
    order = np.lexsort((snapshot.deadline_s, -snapshot.weight))
    assert is_met[order[0]]
