"""The parts of the solvers: classes, prices, levels, pairs by price."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fleet.snapshots import PlainProgram, make_snapshot, odd_shared_snapshot, shared_snapshot
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hocket.fleet.cluster_snapshot import Pairs
from hocket.fleet.policies import POLICIES
from hocket.fleet.policies.normalise import proportional_steps_per_s
from hocket.fleet.solve import partitioned, sharing, water_filling
from hocket.fleet.solve.check import throughputs, verify_allocation
from hocket.fleet.solve.levels import level_demand
from hocket.fleet.solve.price_tables import JobClassTable, new_search
from hocket.fleet.solve.prices import highest_level, root
from hocket.fleet.solve.setup import EQUAL, find_classes
from hocket.kernels.containers import table

SETTINGS = settings(derandomize=True, deadline=None, max_examples=40)


@given(st.integers(0, 10**6))
@SETTINGS
def test_classes_hold_jobs_of_equal_rows_and_nobody_else(seed):
    random = np.random.default_rng(seed)
    rows = random.choice([0.0, 1.0, 2.5, 1e6], (50, 2))
    marks = random.choice([1.0, 2.0], (50, 1))
    classes = find_classes(rows * (1 + 1e-10 * random.random((50, 2))), marks)
    together = np.hstack([rows, marks])
    for job in range(50):
        is_equal = np.all(together == together[job], axis=1)
        assert np.array_equal(classes.of == classes.of[job], is_equal)
    assert classes.num_jobs.sum() == 50
    np.testing.assert_allclose(classes.rows[classes.of], rows, rtol=2 * EQUAL)


def test_rows_that_differ_by_more_than_noise_stay_apart():
    classes = find_classes(np.array([[1.0], [1.0 + 1e-6]]), np.zeros((2, 0)))
    assert len(classes.first) == 2


def random_job_classes(seed: int) -> JobClassTable:
    random = np.random.default_rng(seed)
    num_classes, num_pools = int(random.integers(1, 15)), int(random.integers(1, 7))
    rates = random.uniform(0.0, 5.0, (num_classes, num_pools))
    rates[random.random(rates.shape) < 0.2] = 0.0
    rates[:, 0] += 0.1
    return JobClassTable(
        rates=table(rates, np.float64),
        num_jobs=table(random.integers(1, 6, num_classes), np.float64),
        gang=table(random.choice([1, 2, 4], num_classes), np.float64),
        capacity=table(random.integers(1, 20, num_pools), np.float64),
    )


def plain_load(job_classes: JobClassTable, demand) -> float:
    """The least load by a linear program over all times."""
    num_classes, num_columns = job_classes.rates.shape
    size = num_classes * num_columns
    rows, most = [], []
    for one in range(num_classes):
        row = np.zeros(size + 1)
        row[one * num_columns : (one + 1) * num_columns] = 1.0
        rows.append(row)
        most.append(1.0)
        row = np.zeros(size + 1)
        row[one * num_columns : (one + 1) * num_columns] = -job_classes.rates[one]
        rows.append(row)
        most.append(-demand[one])
    for pool in range(len(job_classes.capacity)):
        row = np.zeros(size + 1)
        for one in range(num_classes):
            row[one * num_columns + pool] = job_classes.gang[one] * job_classes.num_jobs[one]
        row[-1] = -job_classes.capacity[pool]
        rows.append(row)
        most.append(0.0)
    cost = np.zeros(size + 1)
    cost[-1] = 1.0
    return linprog(cost, A_ub=np.array(rows), b_ub=np.array(most), method="highs").fun


@given(st.integers(0, 10**6))
@SETTINGS
def test_the_least_load_is_that_of_the_program_and_proven_by_its_prices(seed):
    from hocket.fleet.solve.kernel import find_load

    job_classes = random_job_classes(seed)
    random = np.random.default_rng(seed)
    demand = random.uniform(0.0, 1.0, len(job_classes.gang)) * job_classes.rates.max(axis=1)
    search = new_search(job_classes, 400)
    search.prices[0] = 1.0 / len(job_classes.capacity)
    expected = plain_load(job_classes, demand)
    # Far above 1 the search stops early: scaled capacities bring every load to 1.
    scaled = job_classes._replace(
        capacity=table(job_classes.capacity * max(expected, 1e-9), np.float64)
    )
    _, load, bill = find_load(scaled, demand, search, 1, 1e-12)
    assert bill <= load + 1e-9
    assert load == pytest.approx(1.0, rel=1e-6)
    assert bill == pytest.approx(1.0, rel=1e-6)


@given(st.integers(0, 10**6))
@SETTINGS
def test_demands_in_closed_form_are_met_at_the_highest_level(seed):
    job_classes = random_job_classes(seed)
    random, size = np.random.default_rng(seed), len(job_classes.gang)
    cap = job_classes.rates.max(axis=1)
    start = random.choice([0.0, 0.3], size)
    start[0] = 0.0
    demands = level_demand(
        cap, random.uniform(0.1, 3.0, size), start, random.choice([0.0, 0.01, 2.0], size)
    )
    fast = highest_level(job_classes, demands, cap, None)
    assert np.array_equal(fast.demand, demands(fast.level))
    progress = (job_classes.rates * fast.shares).sum(axis=1)
    np.testing.assert_allclose(progress, fast.demand, rtol=1e-8)
    again = highest_level(job_classes, demands, cap, fast.warm)
    assert again.level == pytest.approx(fast.level, rel=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 6))
@SETTINGS
def test_a_purchase_is_the_cheapest_that_meets_the_demand_whatever_was_bought_before(seed, columns):
    from hocket.fleet.solve.kernel import find_bill

    random = np.random.default_rng(seed)
    # Few values, so that columns tie, dominate each other and cost nothing.
    rates = random.choice([0.0, 1.0, 2.0, 3.0, 4.5], (12, columns))
    ones = table(np.ones(12), np.float64)
    job_classes = JobClassTable(
        rates=table(rates, np.float64),
        num_jobs=ones,
        gang=ones,
        capacity=table(np.ones(columns), np.float64),
    )
    search, slope = new_search(job_classes, 4), np.zeros(12)
    for _ in range(4):
        price = random.choice([0.0, 0.5, 1.0, 1.7], columns)
        demand = random.choice([0.0, 0.3, 0.5, 1.0], 12) * rates.max(axis=1)
        bill = find_bill(job_classes, demand, search, price, slope)
        assert bill == pytest.approx(sum(map(least_price, rates, [price] * 12, demand)), abs=1e-12)


def least_price(rates, price, demand) -> float:
    """Over all pairs of columns, and resting, that span the demand."""
    rates, price = np.append(rates, 0.0), np.append(price, 0.0)
    best = np.inf
    for slow in np.flatnonzero(rates <= demand):
        for fast in np.flatnonzero(rates >= demand):
            gap = rates[fast] - rates[slow]
            part = (demand - rates[slow]) / gap if gap > 0.0 else 0.0
            best = min(best, price[slow] + part * (price[fast] - price[slow]))
    return best


@given(st.integers(0, 10**6))
@SETTINGS
def test_the_highest_level_is_where_the_least_load_is_one(seed):
    job_classes = random_job_classes(seed)
    cap = job_classes.rates.max(axis=1)
    level_answer = highest_level(job_classes, level_demand(cap), cap, None)
    assert plain_load(job_classes, level_answer.demand * (1 - 1e-7)) <= 1.0 + 1e-7
    if np.any(level_answer.demand < cap * (1 - 1e-9)):
        higher = np.minimum(level_answer.level * (1 + 1e-5), cap)
        assert plain_load(job_classes, np.minimum(higher, cap * (1 - 1e-9))) > 1.0 - 1e-7
    used = (job_classes.gang * job_classes.num_jobs) @ level_answer.shares
    assert np.all(used <= job_classes.capacity * (1 + 1e-9))
    np.testing.assert_allclose(
        (job_classes.rates * level_answer.shares).sum(axis=1), level_answer.demand, rtol=1e-9
    )


@given(st.floats(0.01, 0.99), st.floats(0.5, 2.0))
@SETTINGS
def test_root_finds_where_a_rising_function_is_zero(place, power):
    found = root(lambda x: x**power - place**power, 0.0, -(place**power), 1.0, 1 - place**power)
    assert found == pytest.approx((place, place), rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_pairs_by_price_reach_what_all_pairs_reach(seed, monkeypatch):
    """Column generation from few pairs ends at the optimum over all of them."""
    random = np.random.default_rng(seed)
    n, k = 30, 2
    alone = random.uniform(1.0, 10.0, (n, k))
    beside = alone[:, None, :] * random.uniform(0.4, 0.9, (n, n, k))
    snapshot = make_snapshot(
        alone, [6, 6], pairs=Pairs(profile_of=np.arange(n), steps_per_s=beside)
    )
    monkeypatch.setattr(sharing, "_FEW", 0)
    answer = POLICIES["las"](snapshot)
    verify_allocation(snapshot, answer)
    expected = PlainProgram(snapshot).highest_level(proportional_steps_per_s(snapshot))
    assert answer.objective == pytest.approx(expected, rel=2e-6)
    assert answer.bound >= expected * (1 - 1e-9)


def distinct_sharers(seed: int, num_jobs: int, devices: int):
    """Jobs of which no two are alike, alone or beside others, on three device types."""
    random = np.random.default_rng(seed)
    alone = random.lognormal(0.0, 0.5, (num_jobs, 3)) * np.array([4.0, 2.0, 1.0])
    beside = alone[:, None, :] * random.uniform(0.3, 0.9, (num_jobs, num_jobs, 3))
    beside[random.random((num_jobs, num_jobs)) < 0.1] = 0.0
    pairs = Pairs(profile_of=np.arange(num_jobs), steps_per_s=beside)
    return make_snapshot(
        alone, [devices] * 3, pairs=pairs, remaining_steps=random.uniform(1, 9, num_jobs)
    )


@pytest.mark.parametrize("devices", [4, 8, 12], ids=["scarce", "some", "many"])
@pytest.mark.parametrize("policy", ["las", "makespan"])
@pytest.mark.parametrize("part_size", [24, 16], ids=["halves", "thirds"])
def test_the_method_for_many_reaches_the_program_to_the_gap_it_states(
    policy, devices, part_size, monkeypatch
):
    snapshot = distinct_sharers(devices, 48, devices)
    exact = POLICIES[policy](snapshot)
    monkeypatch.setattr(water_filling, "MANY", 2)
    monkeypatch.setattr(partitioned, "PART_SIZE", part_size)
    answer = POLICIES[policy](snapshot)
    verify_allocation(snapshot, answer)
    assert answer.gap <= 0.3
    assert answer.objective == pytest.approx(exact.objective, rel=0.15)
    if policy == "makespan":
        assert answer.bound <= exact.objective * (1 + 2e-6)
    else:
        assert answer.bound >= exact.objective * (1 - 2e-6)


@given(st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_the_method_for_many_is_legal_and_bounded_for_classes_and_gangs(seed):
    snapshot = shared_snapshot(seed)
    exact = POLICIES["las"](snapshot)
    alone = POLICIES["las"](replace(snapshot, pairs=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(water_filling, "MANY", 1)
        patch.setattr(partitioned, "PART_SIZE", 2 + seed % 3)
        answer = POLICIES["las"](snapshot)
    verify_allocation(snapshot, answer)
    assert answer.bound >= exact.objective * (1 - 1e-6)
    assert answer.objective <= exact.objective * (1 + 1e-6)
    assert answer.objective >= alone.objective * (1 - 1e-6)


@given(st.integers(0, 10**6))
@example(91)
@example(174)
@example(377)
@settings(derandomize=True, deadline=None, max_examples=30)
def test_bounds_hold_for_any_snapshot_whichever_way_it_is_solved(seed):
    snapshot = odd_shared_snapshot(seed)
    if snapshot.num_jobs < 2:
        return
    program = PlainProgram(snapshot)
    share = snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang
    for policy, wanted in (("las", share), ("makespan", snapshot.remaining_steps)):
        level = program.highest_level_of_any_size(wanted)
        exact = levels_of(policy, POLICIES[policy](snapshot))
        assert exact == pytest.approx((level, level), rel=2e-6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(water_filling, "MANY", 1)
            patch.setattr(partitioned, "PART_SIZE", 2 + seed % 3)
            answer = POLICIES[policy](snapshot)
        verify_allocation(snapshot, answer)
        reached, bound = levels_of(policy, answer)
        alone = levels_of(policy, POLICIES[policy](replace(snapshot, pairs=None)))[0]
        assert alone * (1 - 1e-6) <= reached <= level * (1 + 1e-6)
        assert bound >= level * (1 - 1e-6)


def levels_of(policy, answer) -> tuple[float, float]:
    """What an answer reaches and what it proves, higher being better."""
    if policy == "makespan":
        return 1.0 / answer.objective, 1.0 / answer.bound
    return answer.objective, answer.bound


def test_many_jobs_that_share_get_the_same_answer_every_time(monkeypatch):
    monkeypatch.setattr(water_filling, "MANY", 150)
    snapshot = distinct_sharers(1, 160, 20)
    one, two = POLICIES["las"](snapshot), POLICIES["las"](snapshot)
    assert np.array_equal(one.shares, two.shares)
    assert one.shared is not None
    assert two.shared is not None
    assert np.array_equal(one.shared.amount, two.shared.amount)
    assert one.gap <= 0.1


def test_sharing_is_never_worse_than_running_alone():
    for seed in range(5):
        snapshot = shared_snapshot(seed)
        with_pairs = POLICIES["las"](snapshot).objective
        assert with_pairs >= POLICIES["las"](replace(snapshot, pairs=None)).objective * (1 - 1e-7)


def test_deadlines_that_only_pairs_can_keep_are_kept():
    """Two jobs on one device, each at 0.8 of its speed beside the other, and due at 0.7 of it."""
    beside = np.full((2, 2, 1), 0.8)
    pairs = Pairs(profile_of=np.arange(2), steps_per_s=beside)
    due = {"remaining_steps": np.array([70.0, 70.0]), "deadline_s": np.array([100.0, 100.0])}
    snapshot = make_snapshot([[1.0], [1.0]], [1], pairs=pairs, **due)
    together = POLICIES["min-cost-slo"](snapshot)
    assert together.notes["deadlines kept"] == "2"
    assert np.all(throughputs(snapshot, together) >= 0.7 * (1 - 1e-6))
    apart = POLICIES["min-cost-slo"](replace(snapshot, pairs=None))
    assert apart.notes["deadlines kept"] == "1"


def test_the_policy_that_the_documentation_shows_runs_and_is_short():
    text = (Path(__file__).parents[2] / "docs/concepts/fleet_policies.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 20
    names: dict = {}
    exec(code, names)
    snapshot = make_snapshot([[4.0, 1.0], [2.0, 2.0], [1.0, 1.0]], [1, 1])
    answer = names["equal_slowdown"](snapshot)
    verify_allocation(snapshot, answer)
    slowdown = throughputs(snapshot, answer) / snapshot.steps_per_s.max(axis=1)
    assert slowdown.min() == pytest.approx(answer.objective)
    plain = PlainProgram(snapshot).highest_level(snapshot.steps_per_s.max(axis=1))
    assert answer.objective == pytest.approx(plain, rel=1e-6)
