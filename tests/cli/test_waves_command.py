"""``hocket waves`` as it is typed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from planners.plain_kernels import plain_kernels  # noqa: F401
from torch import nn

from hocket.api import make_problem
from hocket.base.errors import UsageError
from hocket.base.units import format_seconds
from hocket.capture.sizes import capture_sizes
from hocket.cli.root import root
from hocket.graph.files import read_graph, write_graph
from hocket.plan.files import read_plan, write_plan
from hocket.plan.make import launched
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import WaveFit, fit_waves
from hocket.simulate.verify import violations
from hocket.view.waves import behind_words, verdict


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
    result = run("waves", graph_file, "--on", "1xv100-16g", "--waves", 4, "--memory", "5MiB",
                 "-o", plan)  # fmt: skip
    assert result.exception is None, result.exception
    for words in ("one batch", "one after the other", "✔  tick-tock", "Tick-tock pays", "replayed"):
        assert words in result.stdout
    saved = read_plan(plan)
    assert max(saved.plan.claims.peak_bytes) <= 5 * 2**20
    assert saved.plan[Lanes].slabs != (0,)
    assert run("verify", plan).exception is None
    simulated = json.loads(run("simulate", plan, "--json").stdout)
    assert simulated["step_s"] < saved.plan.claims.step_s
    told = format_seconds(saved.plan.claims.step_s)
    assert f"{told} with what waits for each other cost" in " ".join(
        run("show", plan).stdout.split()
    )
    assert told in result.stdout
    page = (tmp_path / "report.html").read_text()
    assert all(f">{name}<" in page for name in ("tick", "tock", "together"))


def test_waves_that_do_not_pay_say_why(graph_file):
    command = ("waves", graph_file, "--on", "1xv100-16g", "--launches", "eager", "--json")
    told = json.loads(run(*command).stdout)
    assert (told["pays"], told["feasible"], told["written"]) == (False, True, [])
    replayed = json.loads(run(*command[:-3], "--waves", 4, "--json").stdout)
    for way in (*told["ways"], *replayed["ways"]):
        assert way["step_s"] * way["samples_per_s"] == pytest.approx(2048)
    assert told["gain"] < 1
    assert "issues the ops of both lanes" in told["why"][0]
    assert any("all samples at once fit" in why for why in told["why"])
    # Replayed lanes gain, where they are not judged by larger kernels and few waits do.
    tight = json.loads(run(*command, "--waves", 4, "--memory", "5MiB").stdout)
    assert tight["other_launches"]["gain"] > tight["gain"]
    assert {"lead", "step_s", "peak_bytes"} <= told["starts"][0].keys()


def test_a_plan_of_waves_that_do_not_pay_says_that_it_is_slower(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    result = run("waves", graph_file, "--on", "1xv100-16g", "--launches", "eager", "-o", plan)
    assert result.exception is None, result.exception
    assert "✔  one batch" in result.stdout
    told = " ".join(result.stderr.split())
    assert "report.html: the plan of two waves, slower (" in told
    assert ") than one batch — to time it: hocket run" in told
    assert "hocket.prepare" not in told
    assert read_plan(plan).plan.get(Lanes) is not None


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
    assert bool(behind_words(fit)) == (not pays)


def test_partitions_mark_the_best_way_and_are_written_with_a_report(graph_file, tmp_path):
    plan = tmp_path / "turns.json"
    command = ("waves", graph_file, "--on", "2xv100-16g", "--partitions")
    result = run(*command, "-o", plan)
    assert result.exception is None, result.exception
    told = json.loads(run(*command, "--json").stdout)
    quickest = min(told["ways"], key=lambda way: way["step_s"])["name"]
    assert told["best"] == quickest
    (line,) = [line for line in result.stdout.splitlines() if "✔" in line]
    assert quickest in line
    assert ("slower (" in result.stderr) == (quickest != "waves in turn")
    page = (tmp_path / "turns.report.html").read_text()
    assert all(way["name"] in page for way in told["ways"])
    assert run("verify", plan).exception is None


@pytest.fixture(scope="module")
def in_one_memory(graph_file):
    """The plan of waves that begin together and wait wherever both would hold too much."""
    problem = launched(make_problem(read_graph(graph_file), "1xv100-16g"), "replayed")
    fit, path = fit_waves(problem), graph_file.with_name("plan.json")
    way = next(way for way in fit.tried if way.lanes.waits)
    write_plan(path, problem, fit.plan_of(way))
    assert run("verify", path).exception is None
    return path


def in_a_circle(lanes):
    lanes["waits"] += [[1, 0, 0, 1], [0, 0, 1, 1]]


def without_waits(lanes):
    lanes["waits"] = []


def in_little_memory(lanes):
    lanes["slab_bytes"] //= 2


def with_all_alive(lanes):
    lanes["lived_bytes"] = 2 * lanes["slab_bytes"]


def in_one_lane(lanes):
    lanes["waits"] = [[wave, op, wave, on_op] for wave, op, _, on_op in lanes["waits"]]


def beginning_late(lanes):
    lanes["lead"] = 10**6


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (in_a_circle, "in a circle"),
        (without_waits, "lie in it"),
        (in_little_memory, "lie in it"),
        (with_all_alive, "are said to live in both lanes at once"),
        (in_one_lane, "inside one lane"),
        (beginning_late, "the second lane begins after"),
    ],
)
def test_damaged_lanes_are_no_plan(in_one_memory, tmp_path, damage, words):
    written = json.loads(in_one_memory.read_text())
    lanes = written["sections"]["lanes"]
    assert lanes["slab_bytes"] > 0
    assert lanes["waits"]
    damage(lanes)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(written))
    refused = run("verify", damaged)
    assert refused.exit_code == 6
    assert words in " ".join(refused.output.split())


def test_lanes_that_hand_memory_over_are_held_to_each_piece(graph_file, tmp_path):
    plan = tmp_path / "plan.json"
    run("waves", graph_file, "--on", "1xv100-16g", "--waves", 4, "--lean", "-o", plan)
    saved = read_plan(plan)
    lanes = saved.plan[Lanes]
    assert lanes.part_bytes
    assert not violations(saved.plan, saved.problem)
    for number in range(len(lanes.part_bytes)):
        less = tuple(size // 2 if n == number else size for n, size in enumerate(lanes.part_bytes))
        (wrong,) = violations(saved.plan.having(replace(lanes, part_bytes=less)), saved.problem)
        assert f"memory {number + 2} of the lanes" in wrong.message
    swapped = replace(lanes, places=lanes.places[::-1])
    assert violations(saved.plan.having(swapped), saved.problem)


def test_lean_waves_hold_little_more_than_one(graph_file):
    command = ("waves", graph_file, "--on", "1xv100-16g", "--waves", 4, "--json")
    quick, lean = (json.loads(run(*command, *more).stdout) for more in ((), ("--lean",)))
    by_name = {way["name"]: way for way in quick["ways"]}
    little = 1.25 * quick["one_wave_bytes"]
    assert by_name["tick-tock"]["peak_bytes"] > little
    assert by_name["tick-tock, lean"]["peak_bytes"] <= little
    assert lean["budget_bytes"] == round(little)
    assert lean["ways"][-1]["name"] == "tick-tock"
    assert lean["ways"][-1]["peak_bytes"] <= little
    assert lean["ways"][-1]["step_s"] <= by_name["tick-tock, lean"]["step_s"]


def test_waves_that_do_not_fit_end_with_4(graph_file):
    result = run("waves", graph_file, "--on", "1xv100-16g", "--memory", "1MiB", "--json")
    assert result.exit_code == 4
    told = json.loads(result.stdout)
    assert "the leanest need" in told["error"]["message"]
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
