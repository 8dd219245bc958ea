"""``hocket fleet allocate`` and the files it reads."""

import json

import numpy as np
import pytest
from cli.terminal import hocket
from click.testing import CliRunner

from hocket.base.errors import HocketError, InputFileError, UsageError
from hocket.cli.fleet import command
from hocket.fleet.policies import POLICIES
from hocket.fleet.problem_file import parse_problem, read_problem

PROBLEM = {
    "devices": {"v100": 2, "k80": {"num": 3, "price_per_hour": 0.45}},
    "jobs": [
        {"id": "a", "throughputs": {"v100": 10.0, "k80": 1.0}, "gang": 1, "weight": 2},
        {"id": "b", "throughputs": {"v100": 4.0, "k80": None}, "remaining_steps": 100},
        {"id": "c", "throughputs": {"k80": 3}, "team": "x", "deadline_s": 60, "elapsed_s": 5},
    ],
    "teams": {"x": 2.5, "y": 1},
}


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    return path


def run(*arguments):
    return CliRunner().invoke(command, ["allocate", *map(str, arguments)])


def test_a_file_becomes_a_snapshot(problem_file):
    snapshot = read_problem(problem_file)
    assert snapshot.device_types == ("v100", "k80")
    assert snapshot.num_devices.tolist() == [2, 3]
    assert snapshot.price_per_hour.tolist() == [1.0, 0.45]
    assert snapshot.steps_per_s.tolist() == [[10, 1], [4, 0], [0, 3]]
    assert snapshot.weight.tolist() == [2, 1, 1]
    assert snapshot.remaining_steps.tolist() == [np.inf, 100, np.inf]
    assert snapshot.deadline_s.tolist() == [np.inf, np.inf, 60]
    assert snapshot.teams == ("x", "y", "")
    assert snapshot.team_of.tolist() == [2, 2, 0]


def test_json_has_what_is_promised(problem_file):
    result = run(problem_file, "--policy", "las", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert set(answer["allocation"]) == {"a", "b", "c"}
    assert set(answer["allocation"]["b"]) <= {"v100"}
    assert answer["gap"] <= 1e-7
    assert answer["objective"] == pytest.approx(POLICIES["las"](parse_problem(PROBLEM)).objective)
    assert answer["solve_seconds"] >= 0


def test_the_table_names_jobs_and_types(problem_file):
    result = run(problem_file)
    assert result.exit_code == 0, result.output
    assert "v100" in result.output
    assert "las: objective" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["jobs"][0].update(gangs=2), "did you mean 'gang'"),
        (lambda p: p.update(device={}), "did you mean 'devices'"),
        (lambda p: p["jobs"][0]["throughputs"].update(v10=1), "did you mean 'v100'"),
        (lambda p: p["jobs"][0]["throughputs"].update(v100=-1), "a number from 0"),
        (lambda p: p["jobs"][0].update(gang=0), "an integer from 1"),
        (lambda p: p["jobs"][0].update(gang=True), "an integer from 1"),
        (lambda p: p["jobs"][1].update(id="a"), "as is an earlier one"),
        (lambda p: p["jobs"][1].pop("id"), "has no key 'id'"),
        (lambda p: p["jobs"][1].update(team="z"), "unknown team 'z'"),
        (lambda p: p["devices"].update(v100=1.5), "an integer from 0"),
        (lambda p: p.update(devices={}), "devices is empty"),
        (lambda p: p.update(jobs={}), "a list"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(change, message):
    problem = json.loads(json.dumps(PROBLEM))
    change(problem)
    with pytest.raises(InputFileError) as caught:
        parse_problem(problem)
    assert message in str(caught.value)


def test_unknown_policies_and_commands_are_refused(problem_file):
    result = run(problem_file, "--policy", "laz")
    assert isinstance(result.exception, UsageError)
    result = CliRunner().invoke(command, ["alocate"])
    assert isinstance(result.exception, HocketError)
    assert "did you mean 'allocate'" in str(result.exception)


def test_half_a_character_comes_back_as_it_was(tmp_path):
    path = tmp_path / "problem.json"
    job = {"id": "a\ud800", "throughputs": {"v100": 1.0}}
    path.write_text(json.dumps({"devices": {"v100": 1}, "jobs": [job]}))
    for policy in ("las", "fifo-agnostic"):
        told = hocket("fleet", "allocate", path, "--policy", policy, "--json")
        assert list(json.loads(told.stdout)["allocation"]) == ["a\ud800"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_answers_through_the_command(name, tmp_path):
    problem = json.loads(json.dumps(PROBLEM))
    for job in problem["jobs"]:
        job["remaining_steps"] = 1000
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem))
    result = run(path, "--policy", name, "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["policy"] == name
