"""Places where one device more or less, or one term, decides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet.round_fleets import NO_SLACK, fleet, job, submit
from fleet.snapshots import make_snapshot, random_snapshot, shared_snapshot

from hocket.fleet.cluster_snapshot import Pairs
from hocket.fleet.policies import POLICIES
from hocket.fleet.rounds import (
    Finish,
    FleetDevice,
    FleetState,
    Job,
    PairTable,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.improved import _queues
from hocket.fleet.simulator import bind, simulate
from hocket.fleet.solve.levels import LevelProblem
from hocket.fleet.solve.linear import LinearProgram, _ProgramRows, maximise
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.fleet.solve.prices import Duals, proven_level
from hocket.fleet.solve.setup import set_up
from hocket.fleet.solve.sharing import all_columns, pair_rates, rates_beside
from hocket.fleet.traces import Trace
from hocket.kernels.containers import table


@pytest.mark.parametrize("name", ["las", "makespan", "finish-time-fairness", "fifo"])
def test_a_gang_that_fills_a_pool_exactly_runs_all_the_time(name: str) -> None:
    snapshot = make_snapshot([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [5, 2], gang=[4, 1, 2])
    assert POLICIES[name](snapshot).shares.sum(axis=1) == pytest.approx(np.ones(3))


@pytest.mark.parametrize(("beside", "num_shared"), [(0.74, 0), (0.76, 1)])
def test_a_waiting_job_joins_only_where_both_do_much_more(beside: float, num_shared: int) -> None:
    pairs = Pairs(profile_of=np.zeros(2, dtype=np.int64), steps_per_s=np.full((1, 1, 1), beside))
    answer = POLICIES["fifo"](make_snapshot([[1.0], [1.0]], [1], pairs=pairs))
    assert answer.shared is not None
    assert answer.shared.amount.sum() == num_shared


def test_the_last_free_device_is_given_out_at_once() -> None:
    state = submit(fleet(4), job(0, gang=3, slow=0.0))
    state, actions = step(state, Submit(time_s=10.0, jobs=(job(1, slow=0.0),)))
    assert [start.number for start in actions.starts] == [1]
    state, _ = step(state, Finish(time_s=20.0, numbers=(0,)))
    state, actions = step(state, Submit(time_s=30.0, jobs=(job(2, gang=3, slow=0.0),)))
    assert [start.number for start in actions.starts] == [2]
    assert (state.holders[:, 0] >= 0).all()


def gang_behind_bound_jobs(patience_rounds: float) -> FleetState:
    """Four jobs that cannot be stopped hold all devices; a gang of four waits, and one job more."""
    rules = replace(NO_SLACK, patience_rounds=patience_rounds)
    held = (job(number, slow=0.0, preemptible=False) for number in range(4))
    state = submit(fleet(4, rules=rules), *held)
    state = submit(state, job(4, gang=4, slow=0.0))
    for _ in range(20):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    return submit(state, job(5, slow=0.0, preemptible=False))


@pytest.mark.parametrize(("patience_rounds", "is_kept"), [(2.0, True), (1e6, False)])
def test_devices_are_kept_for_a_gang_that_waited_too_long(
    patience_rounds: float, is_kept: bool
) -> None:
    state = gang_behind_bound_jobs(patience_rounds)
    for number in range(4):
        state, _ = step(state, Finish(time_s=state.time_s + 1.0, numbers=(number,)))
        if number < 3:
            assert (state.devices_of(5) == ()) == is_kept
            state, _ = step(state, Tick(time_s=state.next_tick_s))
            assert (state.devices_of(5) == ()) == is_kept
    assert (len(state.devices_of(4)) == 4) == is_kept


def test_debts_end_at_twice_the_patience() -> None:
    rules = replace(NO_SLACK, patience_rounds=3.0)
    state = submit(fleet(1, rules=rules), job(0, slow=0.0, preemptible=False), job(1, slow=0.0))
    for _ in range(60):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.jobs.credit_s[1, 0] == pytest.approx(2.0 * 3.0 * 360.0)
    assert state.jobs.credit_s[0, 0] == pytest.approx(-2.0 * 3.0 * 360.0)


def test_who_has_no_time_in_pairs_is_in_no_pair_and_who_broke_its_word_has_no_slack() -> None:
    jobs = tuple(
        Job(number=n, name="", steps_per_s=(2.0,), total_steps=7200.0, profile=0) for n in range(3)
    )
    beside = PairTable(steps_per_s=np.full((1, 1, 1), 1.8))
    state = new_state(("fast",), (FleetDevice(name="d", device_type="fast"),), pair_table=beside)
    rows = submit(state, *jobs).jobs
    rows.rows["pair_share"] = [0.5, 0.0, 0.5]
    rows.rows["held_s"] = [0.0, 0.0, 2.0 * 3600.0 + 361.0]
    queue, queue_at, slack = _queues(Rules(), rows, 1)
    assert queue.tolist() == [0, 2]
    assert queue_at.tolist() == [[0, 2]]
    assert slack == pytest.approx([150.0 * 300.0 / 310.0, 0.0])


def test_slowdowns_are_those_of_a_closed_form() -> None:
    count = 3
    trace = Trace(
        names=tuple("abc"),
        job_types=("",) * count,
        arrival_s=np.zeros(count),
        gang=np.ones(count, dtype=np.int64),
        weight=np.ones(count),
        total_steps=np.full(count, np.nan),
        duration_s=np.full(count, 1000.0),
        slo_s=np.full(count, np.inf),
    )
    devices = (FleetDevice(name="d", device_type="a"),)
    run = simulate(bind(trace, ("a",), None), devices, Rules(policy="fifo"))
    figures = run.figures()
    assert run.slowdown == pytest.approx([1.0, 2.0, 3.0])
    assert figures["worst_slowdown"] == pytest.approx(3.0)
    parts = np.array([1.0, 1 / 2, 1 / 3])
    assert figures["fairness"] == pytest.approx(parts.sum() ** 2 / (3 * (parts**2).sum()))
    assert figures["share_received_over_target"] == pytest.approx(1.0)


@pytest.mark.parametrize("power", [0.2, 1.0, 9.0])
def test_a_proven_level_is_above_all_that_can_be_served(power: float) -> None:
    one = table(np.ones(1), np.float64)
    job_classes = JobClassTable(
        rates=table(np.ones((1, 1)), np.float64),
        num_jobs=one,
        gang=one,
        capacity=one,
    )
    duals = Duals(worth=np.ones(1), rent=np.zeros(1), price=np.full(1, 1.0 / 3.0))
    found = proven_level(job_classes, lambda level: np.array([level**power]), duals, 1.0)
    assert found**power > 1.0 / 3.0, "a level that is not served"
    assert found == pytest.approx((1.0 / 3.0) ** (1.0 / power), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shares", [False, True])
def test_any_duals_prove_a_bound(seed: int, shares: bool) -> None:
    """Weak duality: whatever a solver says of prices, the bound is one."""
    snapshot = shared_snapshot(seed, 10) if shares else random_snapshot(seed, max_jobs=10)
    level_problem = LevelProblem(
        rates=snapshot.usable_steps_per_s, marks=np.arange(snapshot.num_jobs)[:, None]
    )
    setup = set_up(snapshot, level_problem, pools_types=False)
    program = LinearProgram(job_classes=setup.job_classes)
    if shares:
        pairs = pair_rates(
            snapshot, setup, rates_beside(snapshot, setup, snapshot.usable_steps_per_s)
        )
        program = LinearProgram(
            job_classes=setup.job_classes, pairs=pairs.rates, columns=all_columns(pairs)
        )
    random = np.random.default_rng(seed)
    value = random.uniform(0.1, 1.0, setup.job_classes.rates.shape)
    num_jobs, zeros = setup.job_classes.num_jobs, np.zeros(len(setup.job_classes.gang))
    solved = maximise(program, value, zeros)
    best = float((value * setup.job_classes.rates * solved.alone).sum()) + solved.pair_value
    assert best <= solved.bound * (1.0 + 1e-9)
    assert best == pytest.approx(solved.bound, rel=1e-6)
    parts = _ProgramRows(program)
    matrix = parts.matrix(level_column=zeros)
    limits = np.concatenate([zeros, num_jobs, setup.job_classes.capacity])
    alone = (value * setup.job_classes.rates)[parts.one, parts.at]
    cost = -np.concatenate([alone, parts.pair_values(value), [0.0]])
    duals = np.concatenate([zeros, solved.duals.rent, solved.duals.price])
    for scale in (0.0, 0.3, 0.9, 1.0, 2.0):
        shaken = scale * duals * random.uniform(0.5, 1.0, len(duals))
        assert parts._bound(cost, matrix, limits, shaken) >= best * (1.0 - 1e-9)


def test_what_pairs_earn_beyond_prices_is_in_the_bound() -> None:
    pairs = Pairs(profile_of=np.zeros(2, dtype=np.int64), steps_per_s=np.full((1, 1, 1), 0.9))
    snapshot = make_snapshot([[1.0], [1.0]], [1], pairs=pairs)
    setup = set_up(snapshot, LevelProblem(rates=snapshot.steps_per_s, marks=np.zeros((2, 0))))
    beside = pair_rates(snapshot, setup, rates_beside(snapshot, setup, snapshot.steps_per_s))
    program = LinearProgram(
        job_classes=setup.job_classes, pairs=beside.rates, columns=all_columns(beside)
    )
    parts, value = _ProgramRows(program), np.ones((1, 1))
    limits = np.array([0.0, 2.0, 1.0])
    cost = -np.concatenate([np.ones(1), parts.pair_values(value), [0.0]])
    # At a price of one nobody gains alone; two on the device do 1.8.
    bound = parts._bound(cost, parts.matrix(np.zeros(1)), limits, np.array([0.0, 0.0, 1.0]))
    assert bound >= 1.8
