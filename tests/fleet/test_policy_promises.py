"""Promises of single policies and rounds that no other test would miss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet.snapshots import make_snapshot, random_snapshot
from fleet.test_claims import snapshot
from scipy.optimize import linprog

from hocket.fleet.cluster_snapshot import ClusterSnapshot, Pairs
from hocket.fleet.explain import _earliest_s
from hocket.fleet.forecast import first_start
from hocket.fleet.policies import POLICIES, find_policy
from hocket.fleet.rounds import FleetDevice, Job, Rules, Submit, Tick, new_state, step
from hocket.fleet.solve import water_filling
from hocket.fleet.solve.check import verify_allocation


def can_be_served(cluster: ClusterSnapshot, needs: np.ndarray) -> bool:
    """Whether all needs fit together, as a linear program of its own."""
    n, k = cluster.steps_per_s.shape
    time = np.kron(np.eye(n), np.ones(k))
    devices = np.kron(np.ones(n), np.eye(k)) * np.repeat(cluster.gang, k)
    rates = np.kron(np.eye(n), np.ones(k)) * cluster.usable_steps_per_s.ravel()
    limits = np.concatenate([np.ones(n), cluster.num_devices, -needs * (1.0 - 1e-7)])
    found = linprog(
        np.zeros(n * k), A_ub=np.vstack([time, devices, -rates]), b_ub=limits, method="highs"
    )
    return bool(found.status == 0)


@pytest.mark.parametrize("seed", range(8))
def test_every_deadline_that_fits_beside_the_heavier_ones_is_kept(seed: int) -> None:
    drawn = random_snapshot(seed, max_jobs=12, max_kinds=3)
    random = np.random.default_rng(seed)
    fastest = np.maximum(drawn.usable_steps_per_s.max(axis=1), 1e-9)
    deadline_s = drawn.remaining_steps / fastest * random.uniform(0.5, 4.0, drawn.num_jobs)
    drawn = replace(drawn, deadline_s=deadline_s, num_devices=np.minimum(drawn.num_devices, 5))
    answer = find_policy("min-cost-slo")(drawn)
    needs = drawn.remaining_steps / deadline_s
    kept = np.zeros(drawn.num_jobs, dtype=bool)
    for at in np.lexsort((deadline_s, -drawn.weight)):
        kept[at] = True
        kept[at] = can_be_served(drawn, np.where(kept, needs, 0.0))
    dropped = answer.notes["deadlines dropped"].split(", ")
    expected = [drawn.ids[at] for at in np.flatnonzero(~kept)] or ["none"]
    assert dropped == expected


def test_finish_times_do_not_follow_what_an_overdue_job_claims() -> None:
    def shares(claim: float, is_overdue: bool) -> np.ndarray:
        asked = snapshot([claim, 500.0, 900.0], [is_overdue, False, False], 1)
        asked = replace(asked, elapsed_s=np.full(3, 1000.0))
        return find_policy("finish-time-fairness")(asked).shares

    assert shares(1.0, True) == pytest.approx(shares(900.0, True), abs=1e-6)
    assert shares(1.0, False) != pytest.approx(shares(900.0, False), abs=1e-3)


def test_a_reserved_gang_lets_others_have_their_turn_first() -> None:
    """Gangs of 3, 3 and 2 on two servers of 4: counted in devices all fit, but not on servers."""
    rules = Rules(round_s=100.0, patience_rounds=3.0, stickiness_rounds=8.0, slack_rounds=0.0)
    devices = tuple(
        FleetDevice(name=f"d{at}", device_type="fast", server=str(at // 4)) for at in range(8)
    )
    jobs = tuple(
        Job(number=n, name="", steps_per_s=(1.0,), gang=size, spread_steps_per_s=(0.0,))
        for n, size in enumerate((3, 3, 2))
    )
    state, _ = step(new_state(("fast",), devices, rules), Submit(time_s=0.0, jobs=jobs))
    began_s, turns_s = {0: 0.0, 1: 0.0}, []
    for _ in range(200):
        state, actions = step(state, Tick(time_s=state.next_tick_s))
        larger = [stop.number for stop in actions.stops if stop.number < 2]
        turns_s += [state.time_s - began_s[number] for number in larger]
        began_s |= {start.number: state.time_s for start in actions.starts}
    assert len(turns_s) > 2
    assert min(turns_s) >= 800.0


def test_an_earliest_start_is_told_only_where_it_is_earlier() -> None:
    devices = (
        FleetDevice(name="d0", device_type="fast"),
        FleetDevice(name="d1", device_type="fast"),
    )
    state = new_state(("fast",), devices, Rules(round_s=100.0))
    unknown = Job(number=0, name="", steps_per_s=(1.0,), total_steps=500.0, preemptible=None)
    bound = replace(unknown, number=1, total_steps=50.0, preemptible=False)
    waits = Job(number=2, name="", steps_per_s=(1.0,), total_steps=50.0)
    state, _ = step(state, Submit(time_s=0.0, jobs=(unknown, bound)))
    state, _ = step(state, Submit(time_s=0.0, jobs=(waits,)))
    expected = first_start(state, 2)
    assert expected.start_of(2) == pytest.approx(50.0)
    assert _earliest_s(state, 2, expected) is None


def test_in_a_strict_line_a_job_holds_up_only_those_who_want_the_same_devices() -> None:
    fifo_strict = find_policy("fifo-strict")
    rates = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    wide = make_snapshot(rates, [2, 1], gang=[2, 1, 1])
    assert fifo_strict(wide, None).shares.tolist() == [[1, 0], [0, 0], [0, 1]]
    either = replace(wide, gang=np.array([1, 2, 1]), steps_per_s=np.maximum(rates, [[0], [0], [1]]))
    assert fifo_strict(either, None).shares.tolist() == [[1, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("policy", "scarce", "least", "most"),
    [("las", 1, 1.55, 1.65), ("las", 2, 1.65, 1.85), ("makespan", 2, 0.5, 0.6)],
)
def test_many_jobs_of_which_no_two_are_alike_share_within_a_proven_gap(
    policy, scarce, least, most, monkeypatch
):
    """Above a number of classes, jobs that share are solved in parts, to a known gap."""
    random = np.random.default_rng(scarce)
    steps_per_s = random.uniform(1.0, 9.0, (200, 2))
    part = np.minimum(random.uniform(0.45, 0.95, (200, 200, 1)), 1.0)
    pairs = Pairs(profile_of=np.arange(200), steps_per_s=steps_per_s[:, None, :] * part)
    num_devices = [40 // scarce, 60 // scarce]
    alone = make_snapshot(steps_per_s, num_devices, gang=random.choice([1, 2], 200))
    shared = replace(alone, pairs=pairs)
    exact, without = POLICIES[policy](shared), POLICIES[policy](alone)
    monkeypatch.setattr(water_filling, "MANY", 100)
    answer = POLICIES[policy](shared)
    verify_allocation(shared, answer)
    assert exact.gap <= 1e-6
    assert answer.gap <= 0.25
    assert answer.objective == pytest.approx(exact.objective, rel=0.06)
    assert least < answer.objective / without.objective < most
