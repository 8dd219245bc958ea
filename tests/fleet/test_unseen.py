"""Jobs that no table has: estimates from a few measurements, and corrections by real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hocket.base.errors import UsageError
from hocket.fleet.rounds import (
    FleetDevice,
    FleetState,
    Job,
    Progress,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.throughputs import JobProfile, Throughputs, read_throughputs
from hocket.fleet.throughputs.unseen import (
    belief_from,
    complete,
    conditional_row,
    expected_row,
)

DATA = Path(__file__).parents[3] / "shared" / "data" / "cluster"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public tables are not here")

DEVICE_TYPES = ("fast", "slow", "slower")
NEW = JobProfile("new", 1)


def product_table(num_jobs: int = 20, seed: int = 0) -> Throughputs:
    """Speed and suffering are products of what a job is and where it runs: exactly learnable."""
    random = np.random.default_rng(seed)
    alone = np.exp(random.normal(size=(num_jobs, 1)) - np.arange(3) * 0.7)
    rude = np.exp(-0.5 * random.random(num_jobs))
    delicate = np.exp(-0.5 * random.random(num_jobs))
    kept = delicate[:, None] * rude[None, :]
    return Throughputs(
        device_types=DEVICE_TYPES,
        profiles=tuple(JobProfile(f"job {at}", 1) for at in range(num_jobs)),
        alone=alone,
        beside=kept[:, :, None] * alone[:, None, :],
    )


def without(table: Throughputs, row: int) -> Throughputs:
    return table.only([at for at in range(len(table.profiles)) if at != row])


def test_a_row_follows_from_one_entry_where_types_differ_by_a_factor() -> None:
    table = product_table()
    found = belief_from(without(table, 0), table.profiles[0], {"slow": table.alone[0, 1]})
    assert found.steps_per_s() == pytest.approx(table.alone[0], rel=0.02)
    assert found.logs.deviation[1] == 0.0
    assert (found.logs.deviation[[0, 2]] > 0.0).all()


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_column_or_row_with_one_entry_is_drawn_towards_the_mean(is_turned: bool) -> None:
    table = np.outer(np.linspace(1.0, 2.0, 8), [1.0, 2.0, 4.0, 40.0])
    holed = table.copy()
    holed[1:, 3] = np.nan
    found = complete(holed.T if is_turned else holed, ridge=10.0)
    part = (found.T if is_turned else found)[1:, 3] / table[1:, 3]
    assert (part > 0.6).all()
    assert (part < 0.9).all()


@pytest.mark.parametrize(
    ("alone", "message"),
    [
        ({}, "nothing is known"),
        ({"fast": 0.0}, "nothing is known"),
        ({"fats": 1.0}, "fats"),
        ({"fast": 1.0, "slow": -1.0}, "-1.0 is no number of steps"),
        ({"fast": 1.0, "slow": float("nan")}, "nan is no number of steps"),
        ({"fast": 1.0, "slow": float("inf")}, "inf is no number of steps"),
    ],
)
def test_impossible_questions_are_refused(alone: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        belief_from(product_table(), NEW, alone)


def test_boldness_raises_only_what_was_not_measured() -> None:
    found = belief_from(product_table(), NEW, {"slow": 2.0, "slower": 0.0})
    likely, hoped = found.steps_per_s(), found.steps_per_s(2.0)
    assert hoped[1:] == pytest.approx([2.0, 0.0])
    factor = np.exp(2.0 * found.logs.deviation[0])
    assert hoped[0] == pytest.approx(likely[0] * factor)
    assert factor > 1.05
    for nonsense in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="no boldness"):
            found.steps_per_s(nonsense)


def test_a_row_of_no_table_is_flat_and_uncertain() -> None:
    nothing = expected_row(np.zeros((0, 3)), [], NEW)
    row = conditional_row(nothing, np.array([np.nan, np.log(5.0), np.nan]))
    deviation = row.deviation
    assert np.exp(row.mean) == pytest.approx([5.0, 5.0, 5.0], rel=0.05)
    assert (deviation[[0, 2]] > 0.1).all()
    assert not row.covariance[1].any(), "what is known is known exactly"
    assert not row.covariance[:, 1].any()


def test_the_conditional_row_is_the_regression_on_what_is_known() -> None:
    random = np.random.default_rng(3)
    level = random.normal(scale=3.0, size=(4000, 1))
    rows = level + random.normal(size=(4000, 2)) @ np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.3]])
    known = rows[:, :2].mean(axis=0) + np.array([0.3, 1.4])
    unlike = [JobProfile(f"{'x' * at}", 1) for at in range(len(rows))]
    found = conditional_row(expected_row(rows, unlike, NEW), np.array([*known, np.nan]))
    assert found.mean[:2].tolist() == known.tolist()
    assert not found.covariance[:2].any(), "to the last bit"
    assert found.covariance[2, 2] > 0.0
    row = found.mean
    slope = np.polyfit(rows[:, 1] - rows[:, 0], rows[:, 2] - rows[:, 0], 1)[0]
    moved = row[2] - rows[:, 2].mean() - 0.3
    assert moved == pytest.approx(slope * 1.1, rel=0.15)


def test_a_job_is_like_those_whose_names_differ_in_a_number() -> None:
    """Two families prefer opposite device types; a third is like neither, and so like the mean."""
    sizes = (8, 16, 64)
    profiles = [JobProfile(f"{name}-{size}", 1) for name in ("net", "text") for size in sizes]
    rows = np.array([[1.0, -1.0]] * 3 + [[-1.0, 1.0]] * 3) + np.arange(6)[:, None]
    found = {
        name: conditional_row(
            expected_row(rows, profiles, JobProfile(name, 1)), np.array([0.0, np.nan])
        )
        for name in ("net-32", "net-512", "text-32", "voice-32")
    }
    ratio = {name: row.mean[1] for name, row in found.items()}
    assert ratio["net-32"] < -1.5
    assert ratio["net-32"] < ratio["net-512"] < ratio["voice-32"] == pytest.approx(0.0)
    assert ratio["text-32"] == pytest.approx(-ratio["net-32"])
    spread = {name: row.deviation[1] for name, row in found.items()}
    assert spread["net-32"] < spread["net-512"] < spread["voice-32"]


def test_names_of_any_kind_are_read() -> None:
    hostile = ["", "9" * 400, "0.0", "1e999", "a" * 900, "٣ ٤", "-5", "batch 0"]
    profiles = [JobProfile(name, 2**at) for at, name in enumerate(hostile)]
    rows = np.random.default_rng(0).normal(size=(len(hostile), 3))
    for profile in profiles:
        expected = expected_row(rows, profiles, profile)
        assert np.isfinite(expected.mean).all()
        assert (np.linalg.eigvalsh(expected.covariance) > -1e-9).all()


# ── the public table ─────────────────────────────────────────────────────────────────────────────


def public_table(path: str = "gavel/simulation_throughputs.json") -> Throughputs:
    table = read_throughputs(DATA / path)
    return table.on(("v100", "p100", "k80"))


@needs_data
@pytest.mark.parametrize(
    "path",
    [
        "gavel/simulation_throughputs.json",
        "gavel/physical_cluster_throughputs.json",
        "shockwave/tacc_throughputs.json",
    ],
)
def test_speeds_on_other_types_are_estimated_better_than_by_means(path: str) -> None:
    """Each job of a public table in turn is unseen on all gangs, but for one device type.

    The constants were chosen on the first table.
    """
    table = public_table(path)
    ours, relative, plain, within = [], [], [], []
    for row in np.flatnonzero((table.alone > 0.0).all(axis=1)):
        job = table.profiles[row].job_type
        known = table.only([at for at, p in enumerate(table.profiles) if p.job_type != job])
        gang = np.array([p.gang == table.profiles[row].gang for p in known.profiles])
        means = np.exp(np.log(known.alone[gang & (known.alone > 0.0).all(axis=1)]).mean(axis=0))
        for column, device_type in enumerate(table.device_types):
            speed = table.alone[row, column]
            found = belief_from(known, table.profiles[row], {device_type: speed})
            others = [at for at in range(3) if at != column]
            truth = table.alone[row, others]
            errors = np.abs(found.logs.mean[others] - np.log(truth))
            ours += errors.tolist()
            within += (errors < 2.0 * found.logs.deviation[others]).tolist()
            relative += np.abs(np.log(means[others] / means[column] * speed / truth)).tolist()
            plain += np.abs(np.log(means[others] / truth)).tolist()
    assert np.median(ours) < 0.6 * np.median(relative)
    assert np.median(ours) < 0.2 * np.median(plain)
    assert np.mean(within) > 0.95, "the deviations are those of the errors"


@needs_data
def test_a_model_that_no_table_has_is_estimated_no_worse_than_by_the_mean_ratio() -> None:
    table = public_table()
    full = (table.alone > 0.0).all(axis=1)
    logs = np.log(np.where(full[:, None], table.alone, 1.0))
    model = np.array([profile.job_type.split(" (")[0] for profile in table.profiles])
    gang = np.array([profile.gang for profile in table.profiles])
    ours, relative = [], []
    for row in np.flatnonzero(full):
        seen = full & (model != model[row])
        profiles = [table.profiles[at] for at in np.flatnonzero(seen)]
        expected = expected_row(logs[seen], profiles, table.profiles[row])
        mean = logs[seen & (gang == gang[row])].mean(axis=0)
        for column in range(3):
            known = np.where(np.arange(3) == column, logs[row], np.nan)
            asked = np.isnan(known)
            ours += np.abs(conditional_row(expected, known).mean - logs[row])[asked].tolist()
            relative += np.abs(mean - mean[column] + known[column] - logs[row])[asked].tolist()
    assert np.median(ours) < np.median(relative)


# ── online correction ────────────────────────────────────────────────────────────────────────────


def measured_rounds(state: FleetState, truth: float, rounds: int) -> list[float]:
    """Run a job that really does ``truth`` steps per second; what the state believes each round."""
    done, believed = 0.0, []
    for _ in range(rounds):
        time_s = state.time_s + 360.0
        done += 360.0 * truth
        attempt = int(state.jobs.rows["attempt"][0])
        state, _ = step(state, Progress(time_s=time_s, number=0, attempt=attempt, done_steps=done))
        believed.append(float(state.jobs.steps_per_s[0, 0]))
    return believed


@pytest.mark.parametrize("wrong_by", [0.01, 0.5, 3.0, 100.0])
def test_a_wrong_table_converges_to_what_is_measured(wrong_by: float) -> None:
    truth = 7.0
    state = new_state(("fast", "slow"), (FleetDevice(name="d", device_type="fast"),))
    job = Job(number=0, name="0", steps_per_s=(truth * wrong_by, 1.0))
    state, _ = step(state, Submit(time_s=0.0, jobs=(job,)))
    believed = measured_rounds(state, truth, 20)
    errors = np.abs(np.array(believed) / truth - 1.0)
    assert (np.diff(errors) <= 0.0).all()
    assert errors[0] == pytest.approx(0.5 * abs(wrong_by - 1.0))
    assert errors[-1] < 1e-3


def test_an_estimated_job_moves_to_where_it_is_really_faster() -> None:
    """The estimate says that a job likes the fast device type; measurements say otherwise."""
    table = product_table()
    rates = belief_from(table, NEW, {"slow": 4.0}).steps_per_s()[:2]
    assert rates[0] > rates[1]
    devices = (FleetDevice(name="f", device_type="fast"), FleetDevice(name="s", device_type="slow"))
    state = new_state(("fast", "slow"), devices)
    state, actions = step(
        state, Submit(time_s=0.0, jobs=(Job(number=0, name="0", steps_per_s=tuple(rates)),))
    )
    assert [start.devices for start in actions.starts] == [("f",)]
    really = {"f": 0.5, "s": 4.0}
    held, done = "f", 0.0
    for _ in range(60):
        time_s = state.next_tick_s
        done += really[held] * (time_s - state.time_s)
        attempt = int(state.jobs.rows["attempt"][0])
        state, _ = step(state, Progress(time_s=time_s, number=0, attempt=attempt, done_steps=done))
        state, actions = step(state, Tick(time_s=time_s))
        held = next((start.devices[0] for start in actions.starts), held)
    assert held == "s"
    # It leaves as soon as the belief falls below the other type's, which is measured exactly.
    assert state.jobs.steps_per_s[0, 0] < state.jobs.steps_per_s[0, 1]
    assert state.jobs.steps_per_s[0, 1] == pytest.approx(4.0)


def test_low_rank_tables_are_completed() -> None:
    random = np.random.default_rng(0)
    truth = np.exp(random.normal(size=(40, 2)) @ random.normal(size=(2, 30)) + 1.0)
    known = random.random(truth.shape) < 0.7
    filled = complete(np.where(known, truth, np.nan), rank=2, ridge=1e-3)
    assert (filled[known] == truth[known]).all()
    error = np.abs(np.log(filled / truth))[~known]
    assert np.median(error) < 0.15


@needs_data
def test_unseen_pairs_of_the_public_table() -> None:
    table = read_throughputs(DATA / "gavel" / "simulation_throughputs.json").on(("v100",))
    single = [row for row, profile in enumerate(table.profiles) if profile.gang == 1]
    alone = table.alone[single, 0]
    ratio = table.beside[np.ix_(single, single)][:, :, 0] / alone[:, None]
    ratio = np.where(ratio > 0.0, ratio, np.nan)
    hidden = np.random.default_rng(0).random(ratio.shape) < 0.5
    filled = complete(np.where(hidden, np.nan, ratio))
    tested = hidden & np.isfinite(ratio)
    error = np.abs(np.log(filled / ratio))[tested]
    plain = np.abs(np.log(np.nanmean(ratio[~hidden]) / ratio))[tested]
    assert np.median(error) < 0.5 * np.median(plain)
