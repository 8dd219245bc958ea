"""What every allocation must be: legal, fair, indifferent to names and to noise."""

from dataclasses import replace

import numpy as np
import pytest
from fleet.snapshots import (
    JOB_COLUMNS,
    make_snapshot,
    random_snapshot,
    shared_snapshot,
    snapshots,
    team_snapshots,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import CheckError, UsageError
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies import POLICIES, find_policy
from hocket.fleet.policies.normalise import isolated_steps_per_s, proportional_steps_per_s
from hocket.fleet.solve.check import throughputs, verify_allocation, violations

SETTINGS = settings(derandomize=True, deadline=None, max_examples=25)
MAX_MIN = ("las", "finish-time-fairness", "makespan", "hierarchical", "hierarchical-fifo")


def policies_for(snapshot: ClusterSnapshot) -> list[str]:
    return list(POLICIES)


@given(team_snapshots)
@SETTINGS
def test_every_policy_yields_a_legal_allocation_with_a_small_gap(snapshot):
    for name in policies_for(snapshot):
        answer = POLICIES[name](snapshot)
        verify_allocation(snapshot, answer)
        assert answer.policy == name
        assert answer.gap <= 1e-6, name


@given(st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=10)
def test_every_policy_yields_a_legal_allocation_where_jobs_may_share(seed):
    snapshot = shared_snapshot(seed, max_jobs=12)
    for name in policies_for(snapshot):
        answer = POLICIES[name](snapshot)
        verify_allocation(snapshot, answer)
        assert answer.gap <= 5e-6, name


@given(snapshots)
@SETTINGS
def test_no_job_can_do_better_without_another_doing_worse(snapshot):
    answer = POLICIES["las"](snapshot)
    reached = throughputs(snapshot, answer)
    # Devices of a type are only left over if everybody who could use more runs at full speed.
    used = snapshot.gang @ answer.shares
    has_room = used < snapshot.num_devices * (1 - 1e-6)
    time = answer.shares.sum(axis=1)
    for device_type in np.flatnonzero(has_room):
        here = snapshot.usable_steps_per_s[:, device_type]
        could_add = (here > 0) & (time < 1 - 1e-6)
        assert not could_add.any()
        swaps = (answer.shares > 1e-6) & (snapshot.usable_steps_per_s < here[:, None] * (1 - 1e-6))
        assert not swaps.any(), "a job would be faster on devices that are free"
    assert np.all(reached >= 0)


@given(snapshots)
@SETTINGS
def test_every_job_has_at_least_its_part_of_the_cluster(snapshot):
    """Sharing incentive: with equal weights nobody is worse off than with an equal part."""
    snapshot = replace(
        snapshot, weight=np.ones(snapshot.num_jobs), gang=np.ones_like(snapshot.gang)
    )
    runnable = snapshot.usable_steps_per_s.any(axis=1)
    reached = throughputs(snapshot, POLICIES["las"](snapshot))
    alone = isolated_steps_per_s(snapshot)
    assert np.all(reached[runnable] >= alone[runnable] * (1 - 1e-6))


@given(snapshots, st.floats(0.01, 100.0))
@SETTINGS
def test_las_does_not_care_in_which_unit_a_job_counts_steps(snapshot, factor):
    scaled = snapshot.steps_per_s.copy()
    scaled[::2] *= factor
    before = POLICIES["las"](snapshot)
    after = POLICIES["las"](replace(snapshot, steps_per_s=scaled))
    assert after.objective == pytest.approx(before.objective, rel=1e-7)
    scale = np.where(np.arange(snapshot.num_jobs) % 2 == 0, factor, 1.0)
    reached = throughputs(replace(snapshot, steps_per_s=scaled), after)
    np.testing.assert_allclose(reached, throughputs(snapshot, before) * scale, rtol=1e-6, atol=1e-9)


@given(snapshots, st.integers(0, 4))
@SETTINGS
def test_more_devices_never_lower_the_level(snapshot, device_type):
    more = snapshot.num_devices.copy()
    more[device_type % snapshot.num_types] += 3
    # The normaliser counts devices, so the old one is kept to compare like with like.
    makespan = POLICIES["makespan"](snapshot).objective
    assert POLICIES["makespan"](replace(snapshot, num_devices=more)).objective <= makespan * (
        1 + 1e-7
    )


@pytest.mark.parametrize("name", ["las", "finish-time-fairness", "makespan"])
def test_agnostic_is_aware_where_all_types_are_equal(name):
    snapshot = random_snapshot(11, max_jobs=20, max_kinds=3)
    column = np.maximum(snapshot.steps_per_s.max(axis=1, keepdims=True), 0.1)
    snapshot = replace(snapshot, steps_per_s=np.repeat(column, snapshot.num_types, axis=1))
    twin = "ftf-agnostic" if name == "finish-time-fairness" else f"{name}-agnostic"
    aware, agnostic = POLICIES[name](snapshot), POLICIES[twin](snapshot)
    np.testing.assert_allclose(aware.shares, agnostic.shares, atol=1e-9)


def test_agnostic_las_spreads_every_job_over_types_by_their_number():
    snapshot = make_snapshot(np.random.default_rng(0).uniform(1, 9, (40, 3)), [10, 5, 5])
    shares = POLICIES["las-agnostic"](snapshot).shares
    np.testing.assert_allclose(shares, np.tile([0.25, 0.125, 0.125], (40, 1)), atol=1e-9)


@given(team_snapshots, st.integers(0, 100))
@SETTINGS
def test_the_order_of_jobs_does_not_matter(snapshot, seed):
    order = np.random.default_rng(seed).permutation(snapshot.num_jobs)
    mixed = replace(
        snapshot,
        ids=tuple(snapshot.ids[job] for job in order),
        **{name: getattr(snapshot, name)[order] for name in JOB_COLUMNS},
    )
    for name in MAX_MIN:
        here, there = POLICIES[name](snapshot), POLICIES[name](mixed)
        np.testing.assert_allclose(
            throughputs(snapshot, here)[order], throughputs(mixed, there), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("name", [*MAX_MIN, "las-agnostic", "max-throughput", "min-cost"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise_of_one_in_a_billion_moves_no_share(name, seed):
    random = np.random.default_rng(seed)
    table = random.uniform(1.0, 10.0, (6, 3))
    profile = random.integers(0, 6, 60)
    snapshot = make_snapshot(
        table[profile],
        [9, 9, 9],
        gang=random.choice([1, 2], 6)[profile],
        remaining_steps=(1e4 * (1 + profile)).astype(float),
        team_of=profile % 2,
    )
    noisy = replace(
        snapshot, steps_per_s=snapshot.steps_per_s * (1 + 1e-9 * random.normal(size=(60, 3)))
    )
    before, after = POLICIES[name](snapshot), POLICIES[name](noisy)
    np.testing.assert_allclose(before.shares, after.shares, atol=2e-6)


@given(team_snapshots)
@SETTINGS
def test_a_warm_start_reaches_the_same_answer(snapshot):
    for name in MAX_MIN:
        cold = POLICIES[name](snapshot)
        warm = POLICIES[name](snapshot, cold.warm)
        if not name.startswith("hierarchical"):
            # There the first level may be any of those at which nobody needs more devices.
            assert warm.objective == pytest.approx(cold.objective, rel=1e-8)
        reached = throughputs(snapshot, warm)
        np.testing.assert_allclose(reached, throughputs(snapshot, cold), rtol=1e-5, atol=1e-9)


def test_teams_share_by_weight_whatever_their_number_of_jobs():
    steps = np.ones((9, 1))
    snapshot = make_snapshot(
        steps, [4], team_of=[0] * 8 + [1], teams=("many", "one"), team_weight=np.array([1.0, 1.0])
    )
    reached = throughputs(snapshot, POLICIES["hierarchical"](snapshot))
    # The single job of a team cannot use half of four devices; what it leaves goes to the others.
    np.testing.assert_allclose(reached, [3 / 8] * 8 + [1.0], rtol=1e-9)
    queued = throughputs(snapshot, POLICIES["hierarchical-fifo"](snapshot))
    np.testing.assert_allclose(queued, [1, 1, 1, 0, 0, 0, 0, 0, 1], atol=1e-9)


def test_fifo_stops_at_the_first_job_that_does_not_fit():
    snapshot = make_snapshot(np.ones((4, 1)), [4], gang=[3, 2, 1, 1])
    assert POLICIES["fifo"](snapshot).shares[:, 0].tolist() == [1, 0, 0, 0]


def test_shortest_job_first_runs_short_jobs_on_their_fastest_type():
    snapshot = make_snapshot(
        [[1.0, 2.0], [1.0, 3.0], [2.0, 1.0]],
        [1, 1],
        remaining_steps=np.array([100.0, 10.0, 15.0]),
    )
    shares = POLICIES["shortest-job-first"](snapshot).shares
    assert shares.tolist() == [[0, 0], [0, 1], [1, 0]]


def test_a_job_that_fits_nowhere_is_named_and_holds_nobody_up():
    snapshot = make_snapshot([[1.0], [1.0], [0.0]], [2], gang=[1, 4, 1])
    answer = POLICIES["las"](snapshot)
    assert answer.notes["cannot run"] == "job1, job2"
    assert answer.shares[:, 0].tolist() == [1, 0, 0]


def test_no_jobs_at_all_is_no_error():
    snapshot = make_snapshot(np.zeros((0, 2)), [1, 1])
    for name in POLICIES:
        assert POLICIES[name](snapshot).shares.shape == (0, 2)


def test_an_unknown_policy_is_refused_with_the_closest_name():
    with pytest.raises(UsageError, match="did you mean 'makespan'"):
        find_policy("makspan")


def test_policies_that_count_steps_need_them():
    snapshot = make_snapshot([[1.0]], [1], remaining_steps=np.array([np.inf]))
    for name in ("makespan", "finish-time-fairness", "shortest-job-first"):
        with pytest.raises(UsageError, match="remaining"):
            POLICIES[name](snapshot)


def test_the_check_finds_every_kind_of_violation():
    snapshot = make_snapshot([[1.0, 0.0], [1.0, 1.0]], [1, 1])
    answer = POLICIES["las"](snapshot)
    for shares, word in (
        ([[1.0, 0.0], [1.0, 0.0]], "devices"),
        ([[0.0, 0.5], [0.0, 0.0]], "cannot run"),
        ([[0.0, 0.0], [0.7, 0.7]], "of its time"),
        ([[-0.1, 0.0], [0.0, 0.0]], "share of"),
    ):
        wrong = replace(answer, shares=np.array(shares))
        assert any(word in one for one in violations(snapshot, wrong)), word
        with pytest.raises(CheckError):
            verify_allocation(snapshot, wrong)


def test_weights_and_gangs_count_as_the_paper_says():
    snapshot = make_snapshot(np.ones((3, 1)), [4], gang=[2, 4, 4], weight=[1.0, 1.0, 2.0])
    assert proportional_steps_per_s(snapshot).tolist() == [1, 1, 1]
    level = snapshot.gang * throughputs(snapshot, POLICIES["las"](snapshot)) / snapshot.weight
    np.testing.assert_allclose(level, [1.0, 1.0, 1.0], rtol=1e-8)


@pytest.mark.parametrize(
    "snapshot",
    [
        make_snapshot(np.ones((3, 2)), [0, 0]),
        make_snapshot(np.zeros((3, 2)), [1, 1]),
        make_snapshot([[1e-9, 1e12], [1e12, 1e-9], [1, 1e6]], [1, 2]),
        make_snapshot(np.ones((50, 3)), [1, 1, 1], weight=np.logspace(-6, 6, 50)),
    ],
    ids=["no-device", "no-throughput", "far-apart", "weights-far-apart"],
)
def test_extreme_snapshots_have_an_answer(snapshot):
    for name in POLICIES:
        answer = POLICIES[name](snapshot)
        verify_allocation(snapshot, answer)
        assert answer.gap <= 1e-5, name
