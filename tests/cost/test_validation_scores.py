"""Scores, the choice of calibration rows, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from hocket.base.errors import UsageError
from hocket.cli.validate import command
from hocket.cost import validation as module
from hocket.cost.parallel.similarity import similarity, similarity_of_runs
from hocket.cost.validation import (
    RankingScore,
    TableScores,
    Tolerance,
    error_score,
    kendall_tau,
    load_tables,
    most_telling,
    out_of_memory_score,
    ranking_score,
    validate,
)

TABLES = load_tables()


# ── scores ───────────────────────────────────────────────────────────────────────────────────────


def test_errors_are_summarised():
    score = error_score(np.array([0.1, -0.3, 0.0, 0.2]))
    assert (score.rows, score.max) == (4, 0.3)
    assert score.mean == pytest.approx(0.15)
    assert score.bias == pytest.approx(0.0)
    assert error_score(np.array([])) is None


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.permutations(range(7)), st.permutations(range(7)))
def test_tau_is_that_of_scipy(first, second):
    one, other = np.array(first, dtype=float), np.array(second, dtype=float)
    assert kendall_tau(one, other) == pytest.approx(kendalltau(one, other).statistic)


def test_regret_is_what_the_choice_loses():
    rows = [replace(TABLES["bloom"][0], step_s=seconds) for seconds in (10.0, 11.0, 15.0)]
    right = ranking_score(rows, np.array([1.0, 2.0, 3.0]))
    assert (right.groups, right.mean_regret, right.kendall_tau) == (1, 0.0, 1.0)
    wrong = ranking_score(rows, np.array([3.0, 2.0, 1.0]))
    assert wrong.max_regret == pytest.approx(0.5)
    assert wrong.kendall_tau == -1.0


def test_runs_of_different_batches_are_no_alternatives():
    rows = [
        replace(row, config=replace(row.config, global_batch=2048 * (index + 1)))
        for index, row in enumerate([TABLES["bloom"][0]] * 3)
    ]
    assert ranking_score(rows, np.ones(3)) is None


def test_out_of_memory_is_counted_both_ways():
    rows = [replace(TABLES["bloom"][0], is_oom=is_oom) for is_oom in (True, True, False, False)]
    score = out_of_memory_score(rows, np.array([2.0, 0.5, 0.5, 2.0]), np.ones(4))
    assert (score.ran_out, score.missed, score.ran, score.false_alarms) == (2, 1, 2, 1)
    alone = out_of_memory_score(rows[2:], np.array([0.5, 2.0]), np.ones(2))
    assert (alone.ran_out, alone.ran, alone.false_alarms) == (0, 2, 1)
    assert out_of_memory_score([], np.ones(0), np.ones(0)) is None


# ── calibration rows ─────────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=8, max_size=30))
def test_chosen_rows_are_distinct_even_where_configurations_repeat(points):
    array = np.array(points, dtype=float)
    shared, tables = similarity(array, array), ["one"] * len(array)
    chosen = most_telling(shared, tables, 4)
    assert len(set(chosen)) == 4
    assert chosen == most_telling(shared, tables, 4)


def test_chosen_rows_stand_for_their_neighbours():
    centres = np.array([0.0, 100.0, 200.0])
    points = (centres[:, None] + np.array([-2.0, -1.0, 0.0, 1.0, 2.0])).reshape(-1, 1)
    chosen = most_telling(similarity(points, points), ["one"] * len(points), 3)
    assert sorted(points[chosen, 0]) == centres.tolist()


def test_at_most_half_of_a_table_is_taken():
    points = np.arange(12.0)[:, None]
    tables = ["small"] * 4 + ["large"] * 8
    chosen = most_telling(similarity(points, points), tables, 10)
    assert sum(tables[index] == "small" for index in chosen) == 2
    assert len(chosen) == 6


def test_choice_of_rows_does_not_look_at_times():
    rows = TABLES["bloom"]
    other = [replace(row, step_s=1.0) for row in rows]
    assert np.array_equal(similarity_of_runs(rows)[1], similarity_of_runs(other)[1])


# ── the whole ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def results():
    return {result.table: result for result in validate(TABLES)}


def test_at_most_ten_rows_of_a_site_calibrate_and_are_not_scored(results):
    per_site = {}
    for name, result in results.items():
        site = TABLES[name][0].cluster
        per_site[site] = per_site.get(site, 0) + result.num_calibration_rows
        if result.calibrated.step:
            timed = sum(row.step_s is not None for row in TABLES[name])
            assert result.calibrated.step.rows == timed - result.num_calibration_rows
    assert max(per_site.values()) <= 10
    assert per_site["selene"] == 10


def test_half_of_every_table_is_kept(results):
    for name, result in results.items():
        assert result.num_calibration_rows <= len(TABLES[name]) / 2


def test_memory_is_within_tolerance(results):
    assert results["korthikanti-memory"].calibrated.memory.mean < 0.05
    bloom = results["bloom"].calibrated
    assert bloom.memory.mean < 0.06
    assert (bloom.out_of_memory.missed, bloom.out_of_memory.false_alarms) == (0, 0)


def test_acalibrated_site_is_told_from_runs_that_took_part(results):
    changed = dict(TABLES)
    chosen = module.calibrated_site("jean-zay", TABLES)
    # Rows that did not take part do not move the fit, whatever they say.
    changed["bloom"] = [
        row
        if (row.table, row.row) in chosen.timed or row.step_s is None
        else replace(row, step_s=2 * row.step_s)
        for row in TABLES["bloom"]
    ]
    assert module.calibrated_site("jean-zay", changed).coefficients == chosen.coefficients


def test_violations_say_what_is_outside():
    part = TableScores(
        step=error_score(np.array([0.3, 0.1])),
        ranking=None,
        memory=error_score(np.array([0.1])),
        out_of_memory=None,
    )
    strict = Tolerance()
    assert strict.violations(part, is_calibrated=False) == ["mean error is 20.0%, allowed 15.0%"]
    found = strict.violations(part, is_calibrated=True)
    assert [text.split(" is ")[0] for text in found] == [
        "mean error", "95th percentile of the error", "mean error of memory",
    ]  # fmt: skip
    lenient = Tolerance(zero_shot_mean=None)
    assert lenient.violations(part, is_calibrated=False) == []


@pytest.mark.parametrize(("groups", "limit"), [(3, None), (4, 0.02)])
def test_mean_regret_of_few_groups_is_shown_without_a_limit(groups, limit):
    ranking = RankingScore(groups=groups, mean_regret=0.05, max_regret=0.06, kendall_tau=0.0)
    part = TableScores(step=None, ranking=ranking, memory=None, out_of_memory=None)
    assert Tolerance().mean_regret_of(ranking) == limit
    assert len(Tolerance().violations(part, is_calibrated=True)) == (limit is not None)


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_command_prints_tables_for_people():
    outcome = CliRunner().invoke(command, ["korthikanti-memory"])
    assert outcome.exit_code == 0, outcome.output
    assert "korthikanti-memory" in outcome.output
    assert "all within tolerance" in outcome.output


def test_command_prints_json_for_programs():
    outcome = CliRunner().invoke(command, ["sc21-table1", "korthikanti-memory", "--json"])
    assert outcome.exit_code == 0, outcome.output
    content = json.loads(outcome.stdout)
    assert [table["table"] for table in content["tables"]] == ["korthikanti-memory", "sc21-table1"]
    assert content["tables"][1]["zero_shot"]["step"]["rows"] == 10


def test_command_fails_outside_tolerance(monkeypatch):
    monkeypatch.setattr(module, "tolerance_of", lambda name: Tolerance(memory_mean=0.001))
    outcome = CliRunner().invoke(command, ["korthikanti-memory", "--json"])
    assert outcome.exit_code == 6
    content = json.loads(outcome.stdout)
    assert "mean error of memory" in content["error"]["message"]
    assert content["tables"][0]["ok"] is False


def test_command_knows_its_tables():
    outcome = CliRunner().invoke(command, ["sc21-tabel1"])
    assert isinstance(outcome.exception, UsageError)
    assert "did you mean 'sc21-table1'" in str(outcome.exception)


def test_releases_of_a_program_are_no_alternatives():
    rows = [replace(TABLES["bloom"][0], release=name, step_s=10.0) for name in ("25.09", "25.11")]
    assert ranking_score(rows, np.ones(2)) is None
    assert ranking_score([replace(row, release="") for row in rows], np.ones(2)).groups == 1
