"""Policies give the values of plain linear programs with one variable per job and kind."""

from dataclasses import replace

import numpy as np
import pytest
from fleet.markets import (
    JOB_COLUMNS,
    PlainProgram,
    late_shared_market,
    markets,
    random_market,
    shared_markets,
    team_markets,
)
from hypothesis import given, settings

from hocket.fleet.policies import POLICIES
from hocket.fleet.policies.normalise import isolated_steps_per_s, proportional_steps_per_s
from hocket.fleet.solve.check import throughputs, verify_allocation

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)
FEWER = settings(derandomize=True, deadline=None, max_examples=15)


def can_run(market):
    return np.flatnonzero(market.usable_steps_per_s.any(axis=1))


def only(market, jobs):
    """The market of some of its jobs; the normalisers must not depend on who is left out."""
    rows = {name: getattr(market, name)[jobs] for name in JOB_COLUMNS}
    return replace(market, ids=tuple(market.ids[job] for job in jobs), **rows)


@given(markets)
@SETTINGS
def test_las_reaches_the_level_of_the_plain_program(market):
    market = only(market, can_run(market))
    answer = POLICIES["las"](market)
    verify_allocation(market, answer)
    owed = market.weight * proportional_steps_per_s(market) / market.gang
    expected = PlainProgram(market).highest_level(owed)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound >= expected * (1 - 1e-9)
    assert answer.gap <= 1e-7


@given(markets)
@SETTINGS
def test_makespan_is_that_of_the_plain_program(market):
    market = only(market, can_run(market))
    answer = POLICIES["makespan"](market)
    verify_allocation(market, answer)
    scale = market.remaining_steps / 1e4
    expected = 1e4 / PlainProgram(market).highest_level(scale)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound <= expected * (1 + 1e-9)
    assert answer.gap <= 1e-7


def bisected_ratio(market) -> float:
    """Finish-time fairness by bisection over plain feasibility programs."""
    isolated = isolated_steps_per_s(market)
    alone_s = market.isolated_s + market.remaining_steps / isolated
    program = PlainProgram(market)
    fastest = market.usable_steps_per_s.max(axis=1)
    low = float(((market.elapsed_s + market.remaining_steps / fastest) / alone_s).max())

    def is_reached(ratio):
        left_s = ratio * alone_s - market.elapsed_s
        needs = market.remaining_steps / left_s
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


@given(markets)
@FEWER
def test_finish_time_fairness_is_that_of_a_bisection(market):
    market = only(market, can_run(market)[:20])
    answer = POLICIES["finish-time-fairness"](market)
    verify_allocation(market, answer)
    assert answer.objective == pytest.approx(bisected_ratio(market), rel=1e-6)
    assert answer.gap <= 1e-6


@pytest.mark.parametrize("seed", [62, 67, 69, 96, 115, 160])
def test_finish_time_fairness_of_late_jobs_that_share_is_that_of_a_bisection(seed):
    """Demands bend where late jobs reach their top, just where the level is looked for."""
    market = late_shared_market(seed)
    answer = POLICIES["finish-time-fairness"](market)
    verify_allocation(market, answer)
    expected = bisected_ratio(market)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.bound <= expected * (1 + 1e-9)
    assert answer.gap <= 1e-6
    earlier = replace(market, elapsed_s=0.9 * market.elapsed_s)
    warm = POLICIES["finish-time-fairness"](earlier).warm
    again = POLICIES["finish-time-fairness"](market, warm)
    verify_allocation(market, again)
    assert again.objective == pytest.approx(answer.objective, rel=1e-6)


@given(markets)
@SETTINGS
def test_sums_are_those_of_the_plain_program(market):
    weight = market.weight[:, None]
    values = {
        "max-throughput": np.broadcast_to(weight, market.steps_per_s.shape),
        "min-cost": weight / market.price_per_hour[None, :],
    }
    for name, value in values.items():
        answer = POLICIES[name](market)
        verify_allocation(market, answer)
        expected = PlainProgram(market).largest_sum(value)
        assert answer.objective == pytest.approx(expected, rel=1e-6)
        assert answer.bound >= expected * (1 - 1e-9)
        assert answer.gap <= 1e-6


def plain_water_filling(market) -> np.ndarray:
    """Normalised throughputs by freezing, one job at a time, whoever a program cannot raise."""
    owed = market.weight * proportional_steps_per_s(market) / market.gang
    program = PlainProgram(market)
    reached, is_frozen = np.zeros(len(owed)), np.zeros(len(owed), dtype=bool)
    while not is_frozen.all():
        base = np.where(is_frozen, reached, 0.0) * owed * (1 - 1e-9)
        level = program.highest_level(np.where(is_frozen, 0.0, owed), base)
        rise = np.full(len(owed), np.inf)
        for job in np.flatnonzero(~is_frozen):
            others = np.where(is_frozen, reached, level) * owed * (1 - 1e-9)
            others[job] = 0.0
            alone = np.zeros(len(owed))
            alone[job] = owed[job]
            rise[job] = program.highest_level(alone, others) / level
        stuck = rise <= max(1 + 1e-5, rise.min())
        is_frozen[stuck], reached[stuck] = True, level
    return reached


@pytest.mark.parametrize("seed", range(12))
def test_las_fills_to_the_end_like_a_plain_water_filling(seed):
    market = random_market(seed, max_jobs=9, max_kinds=3)
    market = only(market, can_run(market))
    owed = market.weight * proportional_steps_per_s(market) / market.gang
    answer = POLICIES["las-lexicographic"](market)
    reached = throughputs(market, answer) / owed
    np.testing.assert_allclose(reached, plain_water_filling(market), rtol=1e-5)


@given(shared_markets)
@FEWER
def test_las_with_sharing_reaches_the_level_of_the_pairwise_program(market):
    answer = POLICIES["las"](market)
    verify_allocation(market, answer)
    owed = market.weight * proportional_steps_per_s(market) / market.gang
    runnable = can_run(market)
    owed[np.setdiff1d(np.arange(market.num_jobs), runnable)] = 0.0
    expected = PlainProgram(market).highest_level(owed)
    assert answer.objective == pytest.approx(expected, rel=1e-6)
    assert answer.gap <= 2e-6


@given(shared_markets)
@FEWER
def test_makespan_and_sums_with_sharing_are_those_of_the_pairwise_program(market):
    program = PlainProgram(market)
    runnable = can_run(market)
    owed = np.zeros(market.num_jobs)
    owed[runnable] = market.remaining_steps[runnable] / 1e4
    answer = POLICIES["makespan"](market)
    verify_allocation(market, answer)
    assert answer.objective == pytest.approx(1e4 / program.highest_level(owed), rel=2e-6)
    answer = POLICIES["max-throughput"](market)
    verify_allocation(market, answer)
    value = np.broadcast_to(market.weight[:, None], market.steps_per_s.shape)
    assert answer.objective == pytest.approx(program.largest_sum(value), rel=1e-6)


@given(team_markets)
@FEWER
def test_one_team_fair_inside_is_las(market):
    market = replace(
        market,
        team_of=np.zeros(market.num_jobs, dtype=np.int64),
        teams=("all",),
        team_weight=np.ones(1),
    )
    together, las = POLICIES["hierarchical"](market), POLICIES["las"](market)
    np.testing.assert_allclose(
        throughputs(market, together), throughputs(market, las), rtol=1e-6, atol=1e-9
    )


def test_deadlines_are_kept_by_weight_and_the_rest_is_named():
    market = random_market(3, max_jobs=12, max_kinds=2)
    market = only(market, can_run(market))
    fastest = market.usable_steps_per_s.max(axis=1)
    # Everybody wants to run at full speed all the time, on very few devices.
    market = replace(
        market,
        num_devices=np.full(market.num_kinds, 4),
        deadline_s=market.remaining_steps / fastest * 1.01,
    )
    answer = POLICIES["min-cost-slo"](market)
    verify_allocation(market, answer)
    reached = throughputs(market, answer)
    is_met = reached >= fastest / 1.01 * (1 - 1e-6)
    dropped = set(answer.notes["deadlines dropped"].split(", "))
    assert dropped == {market.ids[job] for job in np.flatnonzero(~is_met)} - {"none"}
    assert 0 < is_met.sum() < market.num_jobs
    order = np.lexsort((market.deadline_s, -market.weight))
    assert is_met[order[0]]
