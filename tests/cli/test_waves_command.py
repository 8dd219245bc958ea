"""``hocket waves`` as it is typed."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from planners.plain_kernels import plain_kernels  # noqa: F401
from torch import nn

from hocket.base.errors import UsageError
from hocket.base.units import format_seconds
from hocket.capture.sizes import capture_sizes
from hocket.cli.root import root
from hocket.graph.files import read_graph, write_graph
from hocket.plan.files import read_plan
from hocket.plan.make import make_problem
from hocket.plan.sections import Waves
from hocket.planners.waves.wave_search import WaveFit, fit_waves
from hocket.view.waves import slower_note, verdict


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory):
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    path = tmp_path_factory.mktemp("waves") / "net.json"
    write_graph(capture_sizes(nn.Sequential(*layers), torch.zeros(2048, 64)), path)
    return path


def run(*arguments):
    return CliRunner().invoke(root, list(map(str, arguments)))


def test_waves_that_pay_are_written_as_a_plan_that_others_accept(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    result = run("waves", graph_file, "--on", "1xv100-16g", "--waves", 4, "--memory", "6MiB",
                 "-o", plan)  # fmt: skip
    assert result.exception is None, result.exception
    for words in ("one batch", "one after the other", "✔  tick-tock", "Tick-tock pays", "replayed"):
        assert words in result.stdout
    saved = read_plan(plan)
    assert max(saved.plan.claims.peak_bytes) <= 6 * 2**20
    assert saved.plan[Waves].separate_bytes > 0
    assert run("verify", plan).exception is None
    simulated = json.loads(run("simulate", plan, "--json").stdout)
    assert simulated["step_s"] < saved.plan.claims.step_s
    told = format_seconds(saved.plan.claims.step_s)
    assert f"{told} with stream waits" in " ".join(run("show", plan).stdout.split())
    assert told in result.stdout


def test_waves_that_do_not_pay_say_why(graph_file):
    command = ("waves", graph_file, "--on", "1xv100-16g", "--launches", "eager", "--json")
    told = json.loads(run(*command).stdout)
    assert (told["pays"], told["feasible"], told["written"]) == (False, True, [])
    replayed = json.loads(run(*command[:-3], "--waves", 4, "--json").stdout)
    for way in (*told["candidates"], *replayed["candidates"]):
        assert way["step_s"] * way["samples_per_s"] == pytest.approx(2048)
    assert told["gain"] < 1
    assert "issues the ops of both streams" in told["why"][0]
    assert any("all samples at once fit" in why for why in told["why"])
    # Replayed streams gain where larger kernels do not fit and few waits do.
    tight = json.loads(run(*command, "--waves", 4, "--memory", "6MiB").stdout)
    assert tight["other_launches"]["gain"] > tight["gain"]
    assert {"lead", "step_s", "peak_bytes"} <= told["starts"][0].keys()


def test_a_plan_of_waves_that_do_not_pay_says_that_it_is_slower(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    result = run("waves", graph_file, "--on", "1xv100-16g", "--launches", "eager", "-o", plan)
    assert result.exception is None, result.exception
    assert "✔  one batch" in result.stdout
    told = " ".join(result.stderr.split())
    assert "the plan of two waves, slower (" in told
    assert ") than one batch — to time it: hocket run" in told
    assert "hocket.prepare" not in told
    assert read_plan(plan).plan.get(Waves) is not None


@pytest.mark.parametrize(
    ("gain", "pays", "words"),
    [
        (1.2, True, "Tick-tock pays: 20 % more"),
        (1.01, True, "time both"),
        (1.004, False, "Tick-tock makes no difference here"),
        (0.996, False, "Tick-tock makes no difference here"),
        (0.97, False, "Tick-tock does not pay here: 0.97 times"),
    ],
)
def test_what_nobody_could_measure_is_no_gain(graph_file, monkeypatch, gain, pays, words):
    fit = fit_waves(make_problem(read_graph(graph_file), "1xv100-16g"))
    monkeypatch.setattr(WaveFit, "gain", gain)
    assert (fit.pays, words in verdict(fit)) == (pays, True)
    assert bool(slower_note(fit)) == (not pays)


def test_partitions_mark_the_best_candidate_and_are_written(graph_file, tmp_path):
    plan = tmp_path / "turns.json"
    command = ("waves", graph_file, "--on", "2xv100-16g", "--partitions")
    result = run(*command, "-o", plan)
    assert result.exception is None, result.exception
    told = json.loads(run(*command, "--json").stdout)
    quickest = min(told["candidates"], key=lambda way: way["step_s"])["name"]
    assert told["best"] == quickest
    (line,) = [line for line in result.stdout.splitlines() if "✔" in line]
    assert quickest in line
    assert ("slower (" in result.stderr) == (quickest != "waves in turn")
    assert run("verify", plan).exception is None


def test_waves_that_do_not_fit_end_with_4(graph_file):
    result = run("waves", graph_file, "--on", "1xv100-16g", "--memory", "1MiB", "--json")
    assert result.exit_code == 4
    told = json.loads(result.stdout)
    assert "they need" in told["error"]["message"]
    assert told["feasible"] is False
    enough = told["error"]["hint"].removeprefix("give them ").split(",")[0]
    command = ("waves", graph_file, "--on", "1xv100-16g", "--memory", enough)
    assert run(*command).exception is None


def test_waves_of_several_devices_are_launched(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    result = run("waves", graph_file, "--on", "2xv100-16g", "-o", plan)
    assert result.exception is None, result.exception
    assert f"next: hocket launch {plan} train.py" in result.stderr


def test_more_waves_than_samples_are_refused(tmp_path):
    path = tmp_path / "tiny.json"
    write_graph(capture_sizes(nn.Linear(4, 4), torch.zeros(2, 4)), path)
    refused = run("waves", path, "--on", "1xv100-16g", "--waves", 3)
    assert isinstance(refused.exception, UsageError)
    assert "give a batch of 3 or more" in refused.exception.hint
