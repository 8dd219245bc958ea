"""Bounds, oracles and limits that hold for every answer."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from blackbox.command import hocket

import hocket as package

CLUSTERS = ("2xt4", "mixed-desktop")


def plan(*arguments, cwd="."):
    ended = hocket("plan", *arguments, "--json", cwd=cwd)
    assert ended.code == 0, ended.stderr
    return ended.data


@pytest.mark.parametrize(("family", "cluster"), [*product(("gnmt", "layered"), CLUSTERS)])
def test_the_choice_is_the_best_candidate_between_the_bound_and_the_memory(
    tmp_path, family, cluster
):
    hocket("generate", family, "--ops", 80, "--seed", 2, "-o", tmp_path / "g.json.gz")
    found = plan("g.json.gz", "--on", cluster, cwd=tmp_path)
    steps = [each["step_s"] for each in found["candidates"] if each["feasible"]]
    assert found["step_s"] == min(steps)
    assert found["lower_bound_s"] <= found["step_s"] * (1 + 1e-9)
    devices = package.cluster_from_text(cluster).devices
    memory = {device.name: device.memory_bytes for device in devices}
    assert all(peak <= memory[name] for name, peak in found["peak_bytes"].items())


def test_the_exact_planner_is_at_most_every_other(tmp_path):
    hocket("generate", "series-parallel", "--ops", 9, "--seed", 3, "-o", tmp_path / "g.json.gz")
    names = ("m-topo", "m-etf", "m-sct", "pardnn", "optimal")
    given = [word for name in names for word in ("--planner", name)]
    found = plan("g.json.gz", "--on", "2xt4", "--transfers", "parallel", *given, cwd=tmp_path)
    steps = {each["planner"]: each["step_s"] for each in found["candidates"]}
    assert steps["optimal"] <= min(steps.values()) * (1 + 1e-9)
    assert found["lower_bound_s"] <= steps["optimal"] * (1 + 1e-9)


def test_plans_are_the_same_byte_for_byte(tmp_path):
    hocket("generate", "layered", "--ops", 60, "--seed", 4, "-o", tmp_path / "g.json.gz")
    for name in ("one", "two"):
        assert hocket("plan", "g.json.gz", "--on", "2xt4", "-o", f"{name}.json",
                      cwd=tmp_path).code == 0  # fmt: skip
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_written_plans_are_simulated_as_they_were_predicted(tmp_path):
    hocket("generate", "transformer", "--ops", 100, "--seed", 4, "-o", tmp_path / "g.json.gz")
    found = plan("g.json.gz", "--on", "2xt4", "-o", "plan.json", cwd=tmp_path)
    ended = hocket("simulate", "plan.json", "--json", cwd=tmp_path)
    assert ended.data["step_s"] == pytest.approx(found["step_s"], rel=1e-9)


def test_a_fit_keeps_its_budget_and_less_memory_is_never_faster():
    model, steps = "blackbox.tiny_models:deep_mlp", []
    for memory in ("90KiB", "160KiB", "1MiB"):
        found = hocket("fit", model, "--on", "1xt4", "--memory", memory, "--json").data
        assert found["peak_bytes"] <= found["budget_bytes"]
        assert found["smallest_budget_bytes"] <= found["budget_bytes"]
        assert found["lower_bound_s"] <= found["step_s"] * (1 + 1e-9)
        steps.append(found["step_s"])
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("gpus", ["0,1", "0,1,2", "1,4,5,6", "0-7", "0,1,2,3,4"])
def test_collectives_stay_below_their_certificate_and_above_the_ring(gpus):
    found = hocket("collective", "allreduce", "--on", "dgx1-v100", "--gpus", gpus, "--json").data
    assert found["rate_bps"] <= found["bound_bps"] * (1 + 1e-9)
    offers = {each["algorithm"]: each["rate_bps"] for each in found["offers"]}
    assert found["rate_bps"] >= max(offers.values()) * (1 - 1e-9)


def test_a_fleet_serves_no_job_faster_than_alone(tmp_path):
    rows = [f"j{i},x,{50 * i},{1 + i % 2},{300 + 100 * (i % 5)}" for i in range(12)]
    (tmp_path / "t.csv").write_text("name,job_type,arrival_s,gang,duration_s\n" + "\n".join(rows))
    durations_s = [300 + 100 * (i % 5) for i in range(12)]
    work_s = sum(duration * (1 + i % 2) for i, duration in enumerate(durations_s))
    for policy in ("las", "fifo", "makespan"):
        found = hocket("fleet", "simulate", "t.csv", "--cluster", "v100:2", "--policy", policy,
                       "--json", cwd=tmp_path).data  # fmt: skip
        assert found["num_unfinished"] == 0
        assert found["average_jct_s"] >= np.mean(durations_s) * (1 - 1e-9)
        assert found["makespan_s"] >= work_s / 2


def test_parallel_plans_multiply_to_the_cluster_and_fit():
    found = hocket("parallel", "llama3-8b", "--on", "2xdgx-h100", "--batch", 256, "--json").data
    for each in found["candidates"]:
        degrees = each["tensor"] * each["pipeline"] * each["data"] * each["context"]
        assert degrees == each["num_devices"] <= 16
        assert 0 < each["mfu"] < 1
    feasible = [each["step_s"] for each in found["candidates"] if each["feasible"]]
    assert found["chosen"]["step_s"] == min(feasible)
