"""Markets where throughputs tie, and what is proven of answers: against plain linear programs."""

from __future__ import annotations

import numpy as np
import pytest
from fleet.round_fleets import NO_SLACK
from fleet.snapshots import PlainProgram, make_snapshot, odd_shared_snapshot, shared_snapshot

from hocket.fleet.cluster_snapshot import ClusterSnapshot, Pairs
from hocket.fleet.policies import POLICIES
from hocket.fleet.policies.normalise import isolated_steps_per_s, proportional_steps_per_s
from hocket.fleet.rounds import FleetDevice, Job, PairTable, Submit, Tick, new_state, step
from hocket.fleet.solve.check import throughputs, verify_allocation
from hocket.fleet.solve.prices import root

MAX_MIN = ("las", "makespan", "finish-time-fairness", "hierarchical")


def tied_snapshot(seed: int) -> ClusterSnapshot:
    """Few different throughputs, gangs and devices, so that many mixes load pools alike."""
    random = np.random.default_rng(seed)
    n, k = int(random.integers(2, 13)), int(random.integers(2, 8))
    values = ([0, 1], [0, 1, 2], [1, 2], [0, 1, 1, 4], [0, 0, 1])[int(random.integers(0, 5))]
    steps, devices = random.choice(values, (n, k)).astype(float), random.integers(1, 7, k)
    gang = np.minimum(random.choice([1, 1, 2, 2, 4], n), devices.max())
    cannot = ~(steps * (gang[:, None] <= devices)).any(axis=1)
    steps[cannot, int(np.argmax(devices))] = 1.0
    return make_snapshot(
        steps,
        devices,
        gang=gang,
        weight=random.choice([1.0, 1.0, 2.0], n),
        remaining_steps=random.choice([100.0, 200.0, 1000.0], n),
        elapsed_s=random.choice([0.0, 50.0], n),
        team_of=np.arange(n) % int(random.integers(1, 4)),
    )


def owed_by_las(snapshot: ClusterSnapshot) -> np.ndarray:
    return snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang


def test_nobody_is_left_at_a_part_while_devices_idle() -> None:
    """Answers that change the mix of purchases without lowering its load do not end the search."""
    steps = [[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 0]]
    snapshot = make_snapshot(steps, [5, 5, 3, 1], gang=[2, 2, 1, 4, 2, 1])
    for name in MAX_MIN:
        answer = POLICIES[name](snapshot)
        verify_allocation(snapshot, answer)
        assert answer.gap <= 1e-8, name
        assert throughputs(snapshot, answer) == pytest.approx(np.ones(6), rel=1e-8), name


@pytest.mark.parametrize("seed", [*range(40), 635, 1128])
def test_ties_are_solved_to_eight_digits(seed: int) -> None:
    snapshot = tied_snapshot(seed)
    for name in MAX_MIN:
        answer = POLICIES[name](snapshot)
        verify_allocation(snapshot, answer)
        assert answer.gap <= 1e-8, name
    program = PlainProgram(snapshot)
    reached = throughputs(snapshot, POLICIES["las"](snapshot)) / owed_by_las(snapshot)
    assert reached.min() == pytest.approx(program.highest_level(owed_by_las(snapshot)), rel=1e-8)
    ended_s = (
        snapshot.remaining_steps / throughputs(snapshot, POLICIES["makespan"](snapshot))
    ).max()
    assert 1.0 / ended_s == pytest.approx(program.highest_level(snapshot.remaining_steps), rel=1e-8)


@pytest.mark.parametrize("seed", [202, *range(1000, 1011)])
def test_a_bound_of_sharing_is_one(seed: int) -> None:
    snapshot = odd_shared_snapshot(seed)
    program = PlainProgram(snapshot)
    las = POLICIES["las"](snapshot)
    assert program.highest_level_of_any_size(owed_by_las(snapshot)) <= las.bound * (1.0 + 1e-7)
    alone_s = snapshot.isolated_s + snapshot.remaining_steps / isolated_steps_per_s(snapshot)
    # A little better than what is said to be the best: not all can be served.
    ratio = POLICIES["finish-time-fairness"](snapshot).bound * (1.0 - 1e-6)
    left_s = ratio * alone_s - snapshot.elapsed_s
    if (left_s > 0.0).all():
        assert program.highest_level_of_any_size(snapshot.remaining_steps / left_s) < 1.0


@pytest.mark.parametrize("power", [0.01, 1.0, 7.0, 30.0])
@pytest.mark.parametrize("place", [1e-9, 0.3, 1.0 - 1e-9])
def test_a_root_lies_between_its_two_places(power: float, place: float) -> None:
    def rising(x: float) -> float:
        return max((x / place) ** power - 1.0, -0.5) if x < 1.0 else 1e9

    low, high = root(rising, 0.0, -0.5, 1.0, 1e9)
    assert rising(low) <= 0.0 < rising(high)
    assert high - low <= 1e-12 * high
    assert low == pytest.approx(place, rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_shared_answers_give_every_job_what_they_claim(seed: int) -> None:
    snapshot = shared_snapshot(seed, 16)
    answer = POLICIES["las"](snapshot)
    verify_allocation(snapshot, answer)
    reached = throughputs(snapshot, answer) / owed_by_las(snapshot)
    assert reached.min() >= answer.objective * (1.0 - 1e-6)
    for name in ("max-throughput", "fifo", "hierarchical"):
        verify_allocation(snapshot, POLICIES[name](snapshot))


def test_weights_count_between_jobs_of_one_type_that_share() -> None:
    beside = np.full((1, 1, 1), 0.6)
    snapshot = make_snapshot(
        np.ones((6, 1)),
        [1],
        weight=[5, 5, 5, 1, 1, 1],
        pairs=Pairs(profile_of=np.zeros(6, dtype=np.int64), steps_per_s=beside),
    )
    for name in ("las", "hierarchical"):
        reached = throughputs(snapshot, POLICIES[name](snapshot))
        assert reached[:3] == pytest.approx(5.0 * reached[3:], rel=1e-5), name


def test_rounds_give_time_in_pairs_by_weight() -> None:
    table = PairTable(steps_per_s=np.full((1, 1, 1), 1.2))
    state = new_state(
        ("fast",), (FleetDevice(name="d", device_type="fast"),), NO_SLACK, pair_table=table
    )
    jobs = tuple(
        Job(number=n, name="", steps_per_s=(2.0,), total_steps=1e9, profile=0, weight=weight)
        for n, weight in enumerate([3.0, 3.0, 1.0, 1.0])
    )
    state, _ = step(state, Submit(time_s=0.0, jobs=jobs))
    for _ in range(200):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    held_s = state.jobs.rows["held_s"]
    assert held_s[:2].sum() == pytest.approx(3.0 * held_s[2:].sum(), rel=0.05)
